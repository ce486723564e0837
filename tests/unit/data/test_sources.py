import dataclasses
import multiprocessing
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from ringmaster.codec import from_json, to_json
from ringmaster.techniques.data import PreparedData, fetch, open_data, prepare
from ringmaster.techniques.data.stored_source import prepare_once
from ringmaster.techniques.job_specs import DataSpec
from tests.unit.data.preparing import prepare_here

USERS = """
import torch

class Points:
    num_labels = 3

    def __init__(self, n, scale): self.n, self.scale = n, scale
    def __len__(self): return self.n
    def __getitem__(self, index):
        return {"x": torch.full((2,), self.scale * index), "labels": torch.tensor(index % 3)}

def points(n=12, scale=1.0): return Points(n, scale), Points(3, scale)
def one(): return Points(3, 1.0)
def empty(): return Points(0, 1.0), Points(3, 1.0)
def streamed(): return iter([1]), Points(3, 1.0)
def tuples(): return [(1, 2)], [(1, 2)]

def rows():
    from datasets import Dataset
    made = [{"input_ids": [n, n + 1, n + 2], "labels": n} for n in range(11)]
    return Dataset.from_list(made[:9]), Dataset.from_list(made[9:])

def stream(): return tuple(each.to_iterable_dataset() for each in rows())
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def users(tmp_path, monkeypatch):
    (tmp_path / "mine_data.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "mine_data"
    sys.modules.pop("mine_data", None)


def test_the_standard_library_is_text_that_every_machine_has(cache, monkeypatch):
    part = Path(sysconfig.get_path("stdlib")) / "email"  # a part of it is enough for the test
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(part))
    spec = DataSpec(source="python-stdlib", seq_len=64, vocab_size=512)
    prepared = prepare(spec, cache_dir=cache)
    training, held_out = open_data(spec, cache_dir=cache, prepared=prepared)
    assert prepared.name == "python-stdlib"
    assert prepared.vocab_size == 512
    assert (prepared.num_samples, prepared.num_held_out) == (len(training), len(held_out))
    assert 0.05 < len(held_out) / (len(training) + len(held_out)) < 0.2
    ids = fetch(training, range(0, len(training), 50))["input_ids"]
    assert 0 <= int(ids.min()) <= int(ids.max()) < 512
    assert from_json(PreparedData, to_json(prepared)) == prepared


def test_digits_are_normalised_images_with_labels(cache):
    spec = DataSpec(source="digits")
    prepared = prepare(spec, cache_dir=cache)
    training, held_out = open_data(spec, cache_dir=cache)
    assert (prepared.kind, prepared.num_labels, prepared.image_size, prepared.num_channels) == ("images", 10, 8, 1)
    assert len(training) + len(held_out) == 1797
    batch = fetch(training, range(len(training)))
    assert batch["pixel_values"].shape == (len(training), 1, 8, 8)
    assert batch["pixel_values"].dtype == torch.float32
    assert abs(float(batch["pixel_values"].mean())) < 1e-4
    assert abs(float(batch["pixel_values"].std()) - 1) < 1e-3
    assert set(batch["labels"].tolist()) == set(fetch(held_out, range(len(held_out)))["labels"].tolist())


def test_a_second_prepare_writes_nothing(tmp_path):
    source = CountingSource()
    first = source.prepared(tmp_path)
    assert source.prepared(tmp_path) == first
    assert source.num_writes == 1


def test_what_a_dead_writer_left_is_no_hindrance(tmp_path):
    first = Path(CountingSource().prepared(tmp_path / "a").folder)
    half = tmp_path / "b" / "data" / f"{first.name}.tmp"
    half.mkdir(parents=True)
    (half / "junk").write_text("half a file")
    folder = Path(CountingSource().prepared(tmp_path / "b").folder)
    assert sorted(path.name for path in folder.iterdir()) == ["counted", "data.json"]


def test_several_processes_may_prepare_at_once(tmp_path):
    (tmp_path / "text.txt").write_text("so many words and so few letters\n" * 300)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [context.Process(target=prepare_here, args=(tmp_path, barrier, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=300) for _ in workers]
    for worker in workers:
        worker.join()
    assert len(set(found)) == 1
    assert len(list((tmp_path / "cache" / "data").glob("*/data.json"))) == 1


def test_what_was_prepared_is_opened_even_if_the_files_changed_since(tmp_path, text):
    file = tmp_path / "a.txt"
    file.write_text(text(60))
    spec = DataSpec(path=str(file), seq_len=16, vocab_size=300)
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    before = open_data(spec, cache_dir=tmp_path / "cache")[0][0]["input_ids"]
    file.write_text(text(80, seed=1))
    pinned = open_data(spec, cache_dir=tmp_path / "cache", prepared=prepared)[0]
    assert torch.equal(pinned[0]["input_ids"], before)
    assert len(pinned) == prepared.num_samples
    with pytest.raises(ValueError, match=r"has changed.*start the job again"):
        open_data(spec, cache_dir=tmp_path / "other", prepared=dataclasses.replace(prepared, folder="/gone"))


def test_a_factory_gives_samples_of_any_kind(users, tmp_path):
    spec = DataSpec(factory=f"{users}:points", kwargs={"scale": 2.0})
    prepared = prepare(spec, cache_dir=tmp_path)
    training, _ = open_data(spec, cache_dir=tmp_path, prepared=prepared)
    assert (prepared.name, prepared.kind, prepared.num_samples, prepared.num_held_out) == ("points", "other", 12, 3)
    assert prepared.num_labels == 3
    batch = fetch(training, np.array([4, 1]))
    assert batch["x"].tolist() == [[8.0, 8.0], [2.0, 2.0]]
    assert batch["labels"].tolist() == [1, 1]
    assert not list(tmp_path.glob("data/*"))
    other = prepare(DataSpec(factory=f"{users}:points"), cache_dir=tmp_path)
    assert other.digest != prepared.digest
    with pytest.raises(ValueError, match="has changed"):
        open_data(spec, cache_dir=tmp_path, prepared=other)


def test_a_factory_may_return_data_sets_of_hugging_face_and_streams(users, tmp_path):
    found = []
    for name in ("rows", "stream"):
        spec = DataSpec(factory=f"{users}:{name}")
        prepared = prepare(spec, cache_dir=tmp_path)
        training, _ = open_data(spec, cache_dir=tmp_path, prepared=prepared)
        assert (prepared.num_samples, prepared.num_held_out, prepared.seq_len) == (9, 2, 3)
        batch = fetch(training, np.array([4, 1]))
        assert batch["input_ids"].tolist() == [[4, 5, 6], [1, 2, 3]]
        assert batch["labels"].dtype == torch.int64
        found.append(prepared.digest)
    assert found[0] == found[1]
    assert len(list(tmp_path.glob("data/stream-*/rows.arrow"))) == 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "none given.*exactly one"),
        ({"source": "digits", "path": "x"}, "source and path given"),
        ({"source": "digit"}, "did you mean 'digits'.*python-stdlib, digits"),
        ({"source": "digits", "held_out": 1.0}, "not a share"),
        ({"source": "python-stdlib"}, "seq_len is missing"),
        ({"source": "python-stdlib", "seq_len": 1}, "too short"),
        ({"factory": "mine_data:one"}, r"returned Points.*\(training, held_out\)"),
        ({"factory": "mine_data:empty"}, "no training samples"),
        ({"factory": "mine_data:streamed"}, "training is not a map-style"),
        ({"factory": "mine_data:tuples"}, "a sample is tuple"),
        ({"factory": "__main__:points"}, "module of its own"),
    ],
)
def test_a_wrong_spec_says_what_to_do(users, tmp_path, fields, says):
    with pytest.raises(ValueError, match=says):
        prepare(DataSpec(**fields), cache_dir=tmp_path)


class CountingSource:
    """A source that counts its writes."""

    num_writes = 0

    def prepared(self, folder):
        return prepare_once(self.write, name="counted", location="memory", state=1, settings=None, cache_dir=folder)

    def write(self, folder):
        self.num_writes += 1
        (folder / "counted").write_text("1")
        return PreparedData(name="", digest="d", num_samples=1, num_held_out=0, kind="other", source="")
