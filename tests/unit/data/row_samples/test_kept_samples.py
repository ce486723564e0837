"""What is kept of files changes no sample: data that grew is prepared as if it were prepared for the first time."""

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmaster.techniques.checkpoints import checkpoint
from ringmaster.techniques.data import encoded_rows, open_data, prepare
from ringmaster.techniques.data import stored_source as progress_module
from ringmaster.techniques.data.arrow_files import open_split, values_of
from ringmaster.techniques.data.encoded_rows import RowManifest
from ringmaster.techniques.data.row_source import RowSource
from ringmaster.techniques.data.stored_source import progress_to
from ringmaster.techniques.data_source import DataOptions, column, data_source_of
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.metric import IGNORED


@dataclass(frozen=True, kw_only=True)
class LabelledOptions(DataOptions):
    n_column: str | None = column("n")
    label_column: str | None = column("label")
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LearntOptions(DataOptions):
    n_column: str | None = column("n")


class Labelled(RowSource):
    """The digits of a number, with its class, or with an indicator for each of its classes."""

    name = "labelled"
    options_class = LabelledOptions

    def sample(self, row, *, context):
        value = row["label"]
        label = context.labels.indicators(value) if isinstance(value, list) else context.labels.number(value)
        if row["n"] == 13:
            raise ValueError("13 is not a number of ours")
        return {"input_ids": [int(digit) for digit in str(row["n"])], "labels": label}


class Tagged(Labelled):
    """The digits of a number, each with the class of the row."""

    def sample(self, row, *, context):
        found = super().sample(row, context=context)
        return {**found, "labels": [found["labels"]] * (len(found["input_ids"]) - 1) + [IGNORED]}


class Learnt(RowSource):
    """The digits of a number, of which the digits from the third on are learnt."""

    name = "learnt"
    options_class = LearntOptions
    is_causal = True
    packs = True

    def sample(self, row, *, context):
        digits = [int(digit) for digit in str(row["n"])]
        return {"input_ids": digits, "labels": [IGNORED] * 2 + digits[2:] if len(digits) > 2 else [IGNORED] * 2}


numbers = st.integers(14, 99999999)
NAMES = st.sampled_from(["red", "green", "blue", "007"])
days = st.integers(1, 28).map("2026-01-{:02}".format)


def rows_with(labels):
    return st.lists(st.fixed_dictionaries({"n": numbers, "label": labels, "at": days}), min_size=1, max_size=12)


KINDS = {
    "one class": (Labelled, rows_with(NAMES)),
    "numbers": (Labelled, rows_with(st.integers(0, 12))),
    "several classes": (Labelled, rows_with(st.lists(NAMES, unique=True, max_size=3))),
    "classes of tokens": (Tagged, rows_with(NAMES)),
    "a language model": (Learnt, rows_with(NAMES)),
}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def outcome(source, spec, cache):
    """All that a preparation returns, or what it raises."""
    try:
        prepared = source.prepare(spec, cache_dir=cache)
    except ValueError as error:
        return str(error)
    manifest = RowManifest.read(Path(prepared.folder))
    return replace(prepared, folder=""), manifest and manifest.to_json()


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    """Small files have several parts, which are not synced to the disk."""
    monkeypatch.setattr(checkpoint, "sync_path", lambda path: None)
    monkeypatch.setattr(encoded_rows, "BLOCK_BYTES", 300)


@pytest.fixture
def read(monkeypatch):
    """The first lines of the parts of files of which samples were made."""
    found = []
    original = encoded_rows.rows_of_file

    def rows_of_file(file, spec, reading):
        found.append((Path(file.path).name, file.lines.first_line if file.lines else 1))
        return original(file, spec, reading)

    monkeypatch.setattr(encoded_rows, "rows_of_file", rows_of_file)
    return found


@settings(max_examples=8, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    window=st.sampled_from([None, {"last_rows": 9}, {"last_days": 9}]),
    data=st.data(),
)
def test_data_that_grew_is_prepared_as_if_for_the_first_time(kind, window, data):
    make, rows = KINDS[kind]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        columns = {"time_column": "at", "window": window, "name": "n", "version": "1"}
        spec = DataSpec(path=str(folder / "*.jsonl"), seq_len=data.draw(st.sampled_from([3, 6])), **columns)
        spec = replace(spec, packing=make is Learnt and data.draw(st.booleans()), held_out=0.3)
        for night in range(2):
            for file in data.draw(st.sets(st.sampled_from("abc"), min_size=1)):
                with (folder / f"{file}.jsonl").open("a") as stream:
                    stream.write(lines(data.draw(rows)))
            anew = make()
            anew.keeps_files = False
            whole = outcome(anew, spec, folder / f"anew-{night}")
            assert outcome(make(), spec, folder / "cache") == whole


SENTENCES = [
    " ".join((["one", "two", "three", "what", "is", "it", "yes", "1", ";"] * 3)[n % 7 : n % 7 + n % 5 + 2])
    for n in range(40)
]


def said(text):
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "yes it is"}]


ROWS = {
    "text-classification": [{"text": text, "label": text.split()[0]} for text in SENTENCES],
    "text-regression": [{"text": text, "label": len(text) / 7} for text in SENTENCES],
    "token-classification": [{"tokens": text.split(), "labels": text.split()} for text in SENTENCES],
    "seq2seq": [{"input": text, "target": text[::2] or "one"} for text in SENTENCES],
    "chat": [{"messages": said(text)} for text in SENTENCES],
    "completion": [{"prompt": text, "completion": "yes it is"} for text in SENTENCES],
    "preference": [{"prompt": text, "chosen": "yes", "rejected": "what is it"} for text in SENTENCES],
    "comparison": [{"prompt": text, "chosen": "yes", "rejected": "it", "margin": 1} for text in SENTENCES],
    "unpaired-preference": [{"prompt": text, "completion": "yes", "label": len(text) > 9} for text in SENTENCES],
    "prompt": [{"prompt": text, "answer": 1} for text in SENTENCES],
    "embedding": [{"anchor": text, "positive": "it is"} for text in SENTENCES],
}


def as_csv(rows):
    return ",".join(rows[0]) + "\n" + "".join(",".join(map(str, row.values())) + "\n" for row in rows)


@pytest.mark.parametrize("kind", ROWS)
def test_every_kind_of_row_reads_new_lines_and_files_alone(kind, chat_tokenizer, tmp_path, read, monkeypatch):
    rows, (first, second) = ROWS[kind], (tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    spec = DataSpec(path=str(tmp_path / "*.jsonl"), kind=kind, tokenizer=chat_tokenizer, seq_len=24, held_out=0.2)
    first.write_text(lines(rows[:20]))
    data_source_of(spec).prepare(spec, cache_dir=tmp_path / "cache")
    num_before = len(read)
    assert num_before > 2
    with first.open("a") as file:
        file.write(lines(rows[20:22]))
    second.write_text(lines(rows[22:]))
    prepared = data_source_of(spec).prepare(spec, cache_dir=tmp_path / "cache")
    again = [part for part in read[num_before:] if part[0] == "a.jsonl"]
    assert len(again) < num_before
    assert min(line for _, line in again) > 3
    assert {name for name, _ in read[num_before:]} == {"a.jsonl", "b.jsonl"}
    anew = data_source_of(spec)
    monkeypatch.setattr(type(anew), "keeps_files", False)
    assert replace(anew.prepare(spec, cache_dir=tmp_path / "anew"), folder="") == replace(prepared, folder="")


def test_of_csv_and_parquet_new_files_alone_are_read(chat_tokenizer, tmp_path, read):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = ROWS["text-classification"]
    (tmp_path / "0.csv").write_text(as_csv(rows[:15]))
    spec = DataSpec(path=str(tmp_path / "[0-9].*"), kind="text-classification", tokenizer=chat_tokenizer, held_out=0)
    prepare(spec, cache_dir=tmp_path / "cache")
    parquet.write_table(pyarrow.Table.from_pylist(rows[15:]), tmp_path / "1.parquet")
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    assert read == [("0.csv", 1), ("1.parquet", 1)]
    assert prepared.num_samples + prepared.num_held_out == len(rows)


def test_a_class_that_appears_later_changes_the_numbers_of_others(tmp_path, read):
    spec = DataSpec(path=str(tmp_path / "*.jsonl"), held_out=0)
    (tmp_path / "a.jsonl").write_text(lines({"n": n, "label": "bc"[n % 2]} for n in range(20, 24)))
    assert Labelled().prepare(spec, cache_dir=tmp_path / "cache").labels == ("b", "c")
    (tmp_path / "b.jsonl").write_text(lines([{"n": 1, "label": "a"}]))
    prepared = Labelled().prepare(spec, cache_dir=tmp_path / "cache")
    training, _ = Labelled().open(spec, cache_dir=tmp_path / "cache", prepared=prepared)
    assert prepared.labels == ("a", "b", "c")
    assert [int(sample["labels"]) for sample in training] == [1, 2, 1, 2, 0]
    assert [name for name, _ in read] == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    "changes",
    [
        {"seq_len": 4},
        {"options": {"labels": ("b", "a")}},
        {"options": {"label_column": "other"}},
        {"kwargs": {"n_column": "other"}},
    ],
)
def test_settings_that_change_samples_read_all_again(tmp_path, read, changes):
    (tmp_path / "a.jsonl").write_text(lines({"n": n, "label": "ab"[n % 2], "other": 3} for n in range(20, 24)))
    spec = DataSpec(path=str(tmp_path / "a.jsonl"), held_out=0, seq_len=2)
    Labelled().prepare(spec, cache_dir=tmp_path / "cache")
    read.clear()
    other = replace(spec, **changes)
    assert outcome(Labelled(), other, tmp_path / "cache") == outcome(Labelled(), other, tmp_path / "anew")
    assert len(read) == 2


@pytest.mark.parametrize(
    "changes", [{"held_out": 0.5}, {"packing": True}, {"name": "n", "version": "1"}, {"window": {"last_rows": 30}}]
)
def test_settings_that_choose_samples_read_nothing_again(tmp_path, read, changes):
    (tmp_path / "a.jsonl").write_text(lines({"n": n} for n in range(1000, 1040)))
    spec = DataSpec(path=str(tmp_path / "a.jsonl"), held_out=0.3, seq_len=4)
    Learnt().prepare(spec, cache_dir=tmp_path / "cache")
    read.clear()
    Learnt().prepare(replace(spec, **changes), cache_dir=tmp_path / "cache")
    assert read == []


def test_another_chat_template_reads_all_again(chat_tokenizer, tmp_path, read):
    (tmp_path / "a.jsonl").write_text(lines(ROWS["chat"][:2]))
    spec = DataSpec(path=str(tmp_path / "a.jsonl"), kind="chat", tokenizer=chat_tokenizer, held_out=0)
    first = prepare(spec, cache_dir=tmp_path / "cache")
    for file in Path(chat_tokenizer).iterdir():
        file.write_text(file.read_text().replace(" ; ", " ; ; "))
    second = prepare(replace(spec, seq_len=1024), cache_dir=tmp_path / "cache")
    assert second.digest != first.digest
    assert len(read) == 2


def test_a_wrong_row_names_its_file_and_line_however_late_it_comes(tmp_path):
    spec = DataSpec(path=str(tmp_path / "a.jsonl"), held_out=0)
    file = tmp_path / "a.jsonl"
    file.write_text(lines({"n": n, "label": "a"} for n in range(20, 60)))
    Labelled().prepare(spec, cache_dir=tmp_path / "cache")
    with file.open("a") as stream:
        stream.write(lines([{"n": 13, "label": "a"}]))
    with pytest.raises(ValueError, match=r"a.jsonl, row 41: 13 is not a number of ours"):
        Labelled().prepare(spec, cache_dir=tmp_path / "cache")
    file.write_text(file.read_text().replace("13", "null"))
    with pytest.raises(ValueError, match=r"a.jsonl, line 41 has no value in 'n'. To fix"):
        Labelled().prepare(spec, cache_dir=tmp_path / "cache")
    file.write_text(file.read_text().replace("null", '13, "x": }'))
    with pytest.raises(ValueError, match=r"a.jsonl, line 41 is not valid JSON"):
        Labelled().prepare(spec, cache_dir=tmp_path / "cache")


def test_a_wrong_row_outside_the_window_is_not_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines({"n": n, "label": 0.5 if n == 12 else "a"} for n in range(12, 40)))
    spec = DataSpec(path=str(tmp_path / "*.jsonl"), held_out=0, window={"last_rows": 20})
    assert Labelled().prepare(spec, cache_dir=tmp_path / "cache").num_samples == 20
    with pytest.raises(ValueError, match=r"a.jsonl, row 2: 13 is not a number of ours"):
        Labelled().prepare(replace(spec, window={"last_rows": 27}), cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"a.jsonl, row 1: label 0.5 in column 'label' is not a class"):
        Labelled().prepare(replace(spec, window=None), cache_dir=tmp_path / "cache")


def test_a_copy_of_a_file_is_not_made_into_samples_again(tmp_path, read):
    (tmp_path / "a.jsonl").write_text(lines([{"n": 123}]))
    Learnt().prepare(DataSpec(path=str(tmp_path / "a.jsonl"), held_out=0), cache_dir=tmp_path / "cache")
    (tmp_path / "b.jsonl").write_text(lines([{"n": 123}]))
    Learnt().prepare(DataSpec(path=str(tmp_path / "b.jsonl"), held_out=0), cache_dir=tmp_path / "cache")
    assert read == [("a.jsonl", 1)]


def test_masks_take_a_byte_a_token(chat_tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(ROWS["text-classification"]))
    spec = DataSpec(path=str(tmp_path / "a.jsonl"), kind="text-classification", tokenizer=chat_tokenizer)
    folder = Path(prepare(spec, cache_dir=tmp_path / "cache").folder)
    values = {name: values_of(open_split(folder, "training")[name])[0] for name in ("input_ids", "attention_mask")}
    assert values["input_ids"].nbytes == 4 * values["attention_mask"].nbytes
    training, _ = open_data(spec, cache_dir=tmp_path / "cache")
    assert {str(tensor.dtype) for tensor in training[0].values()} == {"torch.int64"}


@pytest.mark.parametrize("is_kept", [True, False])
def test_preparation_of_rows_reports(chat_tokenizer, tmp_path, monkeypatch, is_kept):
    monkeypatch.setattr(progress_module, "INTERVAL_S", 0.0)
    (tmp_path / "a.jsonl").write_text(lines(ROWS["text-classification"]))
    spec = DataSpec(path=str(tmp_path / "a.jsonl"), kind="text-classification", vocab_size=280)
    found = []
    with progress_to(found.append):
        prepare(replace(spec, tokenizer=chat_tokenizer if is_kept else None), cache_dir=tmp_path / "cache")
    assert found[-1].startswith("preparing: 40 rows, 0 MB")


def test_samples_of_different_shapes_in_two_files_are_refused(tmp_path):
    class Arrays(Learnt):
        is_causal = False

        def sample(self, row, *, context):
            return {"pixel_values": np.zeros(row["n"], np.float32)}

    for name, n in (("a", 2), ("b", 3)):
        (tmp_path / f"{name}.jsonl").write_text(lines([{"n": n}]))
    with pytest.raises(
        ValueError, match=r"b\.jsonl, row 1: its pixel_values.*a\.jsonl, row 1 .*give all rows one shape"
    ):
        Arrays().prepare(DataSpec(path=str(tmp_path / "*.jsonl"), held_out=0), cache_dir=tmp_path / "cache")
