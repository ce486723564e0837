"""Caches notice every change of what they were made of, also where its size and its times are set back."""

import importlib
import json
import os
import shutil
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from ringmaster.registry import resolve
from ringmaster.techniques import Job, ModelSpec
from ringmaster.techniques.data import prepare
from ringmaster.techniques.data.file_patterns import matching
from ringmaster.techniques.data_source import DATA_SOURCES
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.probing.probe import source_states

TEXTS = DataSpec(kind="text-classification", seq_len=16, vocab_size=300)


def write_rows(file: Path, *, is_swapped: bool = False) -> None:
    labels = ("pos", "neg") if is_swapped else ("neg", "pos")
    rows = ({"text": f"this is row {number}", "label": labels[number % 2]} for number in range(40))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def change(file: Path, write) -> None:
    """Changes a file to other content of the same size, and sets its times back."""
    before = file.stat()
    write(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def spec_of(form: str, file: Path) -> DataSpec:
    match form:
        case "path":
            return DataSpec(**{**vars(TEXTS), "path": str(file)})
        case "url":
            return DataSpec(**{**vars(TEXTS), "path": f"file://{file}"})
        case "folder":
            return DataSpec(**{**vars(TEXTS), "dataset": str(file.parent)})
        case _:
            data_files = {"train": [str(file)]}
            return DataSpec(**{**vars(TEXTS), "dataset": "json", "kwargs": {"data_files": data_files}})


@pytest.mark.parametrize("form", ["path", "url", "folder", "data_files"])
def test_labels_that_are_swapped_are_prepared_anew(form, tmp_path):
    (tmp_path / "rows").mkdir()
    file = tmp_path / "rows" / "train.jsonl"
    write_rows(file)
    spec = spec_of(form, file)
    before = prepare(spec, cache_dir=tmp_path / "cache")
    change(file, partial(write_rows, is_swapped=True))
    after = prepare(spec, cache_dir=tmp_path / "cache")
    assert after.digest != before.digest
    assert after.digest == prepare(spec, cache_dir=tmp_path / "anew").digest


def test_a_change_within_the_same_tick_of_the_clock_is_noticed(tmp_path):
    file = tmp_path / "a.txt"
    for number in range(20):
        file.write_text(f"{number:09}")
        before = matching(str(file)).state()
        change(file, lambda file, number=number: file.write_text(f"{number + 1:09}"))
        assert matching(str(file)).state() != before


def test_a_copy_of_a_file_in_its_place_is_noticed(tmp_path):
    file, other = tmp_path / "a.txt", tmp_path / "b.txt"
    file.write_text("one")
    shutil.copy2(file, other)
    before = matching(str(file)).state()
    other.write_text("two")
    shutil.copystat(file, other)
    other.replace(file)
    assert matching(str(file)).state() != before


def test_a_tokenizer_that_changed_in_its_folder_is_read_again(chat_tokenizer, tmp_path):
    write_rows(tmp_path / "a.jsonl")
    AutoTokenizer.from_pretrained(chat_tokenizer).save_pretrained(tmp_path / "tokenizer")
    spec = DataSpec(path=str(tmp_path / "a.jsonl"), seq_len=8, tokenizer=str(tmp_path / "tokenizer"))
    before = prepare(spec, cache_dir=tmp_path / "cache")
    file = tmp_path / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    one, other = sorted(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(content))
    after = prepare(spec, cache_dir=tmp_path / "cache")
    assert after.folder != before.folder
    assert after.digest == prepare(spec, cache_dir=tmp_path / "anew").digest


@pytest.mark.parametrize("form", ["folder", "jsonl", "csv"])
def test_an_image_that_changed_is_read_again(form, tmp_path):
    rng = np.random.default_rng(0)
    names = [f"{label}/{number}.bmp" for label in ("cat", "dog") for number in range(6)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(tmp_path / name)
    rows = [{"image": name, "label": name[:3]} for name in names]
    (tmp_path / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "table.csv").write_text("image,label\n" + "".join(f"{row['image']},{row['label']}\n" for row in rows))
    path = tmp_path / "*" / "*.bmp" if form == "folder" else tmp_path / f"table.{form}"
    options = {"image_size": 8, "mean": 0.5, "std": 0.5}
    spec = DataSpec(path=str(path), kind="image-classification", options=options)
    before = prepare(spec, cache_dir=tmp_path / "cache")
    change(tmp_path / names[0], lambda file: Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(file))
    after = prepare(spec, cache_dir=tmp_path / "cache")
    assert after.digest != before.digest
    assert prepare(spec, cache_dir=tmp_path / "cache") == after


class Listing(BaseHTTPRequestHandler):
    """A server that tells the size of its file alone, or also when it was changed."""

    content, headers_sent = b"", {}

    def do_HEAD(self):
        self.send_response(200)
        for name, value in {"Content-Length": len(self.content), **self.headers_sent}.items():
            self.send_header(name, str(value))
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        self.wfile.write(self.content)

    def log_message(self, *args):
        pass


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Listing)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/rows.jsonl"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("header", [None, "Last-Modified", "ETag", "Content-MD5"])
def test_a_server_that_tells_little_of_a_file_has_it_read(header, url, monkeypatch):
    pytest.importorskip("aiohttp")
    states = []
    for number in (1, 1, 2):
        monkeypatch.setattr(Listing, "content", b'{"n": %d}\n' % number)
        monkeypatch.setattr(Listing, "headers_sent", {} if header is None else {header: f"of {number}"})
        states.append(matching(url).state())
    assert states[0] == states[1] != states[2]


def test_of_a_store_without_checksums_all_times_count():
    system = fsspec.filesystem("memory")
    system.pipe("/stamps/a.txt", b"one")
    before = matching("memory://stamps/a.txt").state()
    system.pipe("/stamps/a.txt", b"two")
    assert matching("memory://stamps/a.txt").state() != before


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The file of a user's module, which can be imported anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    yield tmp_path / "stamped_module.py"
    sys.modules.pop("stamped_module", None)


def imported_anew(name: str):
    sys.modules.pop("stamped_module", None)
    importlib.invalidate_caches()
    return resolve(f"stamped_module:{name}")


def test_code_that_changed_is_compiled_and_measured_anew(module):
    module.write_text("def loss(output, batch):\n    return 1\n")
    job = Job(name="job", model=ModelSpec(), data=DataSpec(source="digits"), loss="stamped_module:loss", num_steps=1)
    assert imported_anew("loss")(None, None) == 1
    before = source_states(job)
    change(module, lambda file: file.write_text("def loss(output, batch):\n    return 2\n"))
    assert imported_anew("loss")(None, None) == 2
    assert source_states(job) != before


def test_the_config_of_a_saved_model_counts(tmp_path):
    (tmp_path / "config.json").write_text('{"dropout": 0.1}')
    model = ModelSpec(from_pretrained=str(tmp_path))
    job = Job(name="job", model=model, data=DataSpec(source="digits"), num_steps=1)
    before = source_states(job)
    change(tmp_path / "config.json", lambda file: file.write_text('{"dropout": 0.0}'))
    assert source_states(job) != before


KIND = """
from dataclasses import dataclass
from ringmaster.techniques.data.row_source import RowSource
from ringmaster.techniques.data_source import DataOptions, column

@dataclass(frozen=True, kw_only=True)
class Options(DataOptions):
    n_column: str | None = column("n")

class Stamped(RowSource):
    name = "stamped"
    options_class = Options

    def sample(self, row, *, context):
        return {"input_ids": [row["n"]], "labels": row["n"] % %d}
"""


def test_rows_are_read_again_by_other_code_of_a_users_kind(module, monkeypatch):
    rows = module.with_name("rows.jsonl")
    rows.write_text("".join(json.dumps({"n": number}) + "\n" for number in range(30)))
    monkeypatch.setitem(DATA_SOURCES.registered, "stamped", "stamped_module:Stamped")
    spec, cache = DataSpec(path=str(rows), kind="stamped"), module.parent / "cache"
    module.write_text(KIND.replace("%d", "2"))
    imported_anew("Stamped")
    assert prepare(spec, cache_dir=cache).num_labels == 2
    change(module, lambda file: file.write_text(KIND.replace("%d", "3")))
    imported_anew("Stamped")
    assert prepare(spec, cache_dir=cache).num_labels == 3
