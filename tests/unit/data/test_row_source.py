"""Kinds of data that make a sample of each row: what is read, how samples are filled up, and what is refused."""

import json
import sys
from dataclasses import dataclass, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from ringmaster.registry import installed
from ringmaster.techniques import data_source
from ringmaster.techniques.data import PreparedData, encoded_rows, fetch, open_data, prepare
from ringmaster.techniques.data.encoded_rows import RowManifest
from ringmaster.techniques.data.row_source import RowSource
from ringmaster.techniques.data_source import (
    DataOptions,
    DataSource,
    column,
    data_source_named,
    data_source_names,
    data_source_of,
)
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.metric import IGNORED

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom" / "my_data_source.py"
ROWS = [{"prompt": f"what is {i} and {i % 7}?", "answer": f"{i + i % 7}, says it", "id": i} for i in range(60)]


@dataclass(frozen=True, kw_only=True)
class CountOptions(DataOptions):
    wrong: int | None = None
    n_column: str | None = column("n", "number")


class Counts(RowSource):
    """The digits of a number as tokens, and their sum as the label; no tokenizer."""

    name = "counts"
    options_class = CountOptions

    def sample(self, row, *, context):
        number = row["n"]
        if number == context.options.wrong:
            raise ValueError("this is not a number of ours")
        digits = [int(digit) for digit in str(number)]
        return {"input_ids": digits, "labels": sum(digits)}


class CountsAgain(Counts):
    version = 2


class LargeCounts(Counts):
    def sample(self, row, *, context):
        return {"input_ids": [row["n"]], "labels": 0}


class Constants(DataSource):
    """Brings its own rows."""

    name = "constants"

    def prepare(self, spec, *, cache_dir):
        return PreparedData(name="c", digest="c", num_samples=2, num_held_out=1, kind="other", source="c")

    def open(self, spec, *, cache_dir, prepared):
        return [{"x": torch.ones(1)}] * 2, [{"x": torch.zeros(1)}]


@pytest.fixture
def kinds(monkeypatch):
    """Kinds of data that are installed."""
    mine = {each.name: f"{__name__}:{each.__qualname__}" for each in (Counts, Constants)}
    mine |= {"digits": f"{__name__}:Constants", "other": f"{__name__}:Counts"}
    monkeypatch.setattr("ringmaster.registry.installed", {data_source.DATA_SOURCES.entry_point_group: mine}.__getitem__)


@pytest.fixture
def answers(monkeypatch):
    """The example's kind of data, installed."""
    spec = spec_from_file_location("my_data_source", EXAMPLE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "my_data_source", module)
    monkeypatch.setattr("ringmaster.registry.installed", lambda group: {"answers": "my_data_source:Answers"})


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def numbers(tmp_path):
    path = write(tmp_path / "numbers.jsonl", [{"n": n, "m": n + 1} for n in (*range(8, 12), 12345)])
    return DataSpec(kind="counts", path=path, seq_len=3, held_out=0)


def test_samples_are_filled_up_and_cut_to_one_length(kinds, numbers, tmp_path):
    prepared = prepare(numbers, cache_dir=tmp_path)
    training, held_out = open_data(numbers, cache_dir=tmp_path, prepared=prepared)
    batch = fetch(training, range(5))
    assert batch["input_ids"].tolist() == [[8, 0, 0], [9, 0, 0], [1, 0, 0], [1, 1, 0], [1, 2, 3]]
    assert batch["attention_mask"].tolist() == [[1, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [8, 9, 1, 2, 15]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert len(held_out) == 0
    assert (prepared.kind, prepared.seq_len, prepared.vocab_size, prepared.num_labels) == ("tokens", 3, 10, 16)


def test_a_batch_is_the_same_however_it_is_divided(kinds, numbers, tmp_path):
    training, _ = open_data(numbers, cache_dir=tmp_path)
    whole = fetch(training, [4, 0, 3])
    parts = [fetch(training, [4, 0]), fetch(training, [3])]
    assert all(torch.equal(whole[name], torch.cat([part[name] for part in parts])) for name in whole)


def test_its_options_select_columns(kinds, numbers, tmp_path):
    other = replace(numbers, kwargs={"n_column": "m"})
    training, _ = open_data(other, cache_dir=tmp_path)
    assert training[0]["labels"].item() == 9


def test_another_version_of_a_kind_prepares_again(kinds, numbers, tmp_path):
    first = prepare(numbers, cache_dir=tmp_path)
    assert prepare(numbers, cache_dir=tmp_path).folder == first.folder
    again = CountsAgain().prepare(numbers, cache_dir=tmp_path)
    assert (again.folder != first.folder, again.digest) == (True, first.digest)


def test_tokens_of_more_than_32_bits_are_refused(kinds, tmp_path):
    spec = DataSpec(kind="counts", path=write(tmp_path / "n.jsonl", [{"n": 2**40}]), seq_len=3, held_out=0)
    with pytest.raises(ValueError, match=r"input_ids has numbers of more than 32 bits\. To fix: "):
        LargeCounts().prepare(spec, cache_dir=tmp_path)


def test_rows_of_a_data_set_are_read_too(kinds, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"n": list(range(40)), "text": ["a"] * 40}).save_to_disk(str(tmp_path / "saved"))
    spec = DataSpec(kind="counts", dataset=str(tmp_path / "saved"), seq_len=2, held_out=0.25)
    training, held_out = open_data(spec, cache_dir=tmp_path)
    assert len(training) + len(held_out) == 40
    assert 0 < len(held_out) < 20


def test_a_prompt_is_read_and_not_learnt(answers, tmp_path):
    spec = DataSpec(kind="answers", path=write(tmp_path / "a.jsonl", ROWS), seq_len=40, vocab_size=280)
    prepared = prepare(spec, cache_dir=tmp_path)
    training, held_out = open_data(spec, cache_dir=tmp_path, prepared=prepared)
    assert (len(training), len(held_out)) == (prepared.num_samples, prepared.num_held_out)
    assert len(training) + len(held_out) == 60 and len(held_out) > 0
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_dir)
    sample = training[0]
    tokens, labels = sample["input_ids"], sample["labels"]
    row = next(
        row for row in ROWS if tokenizer.decode(tokens, skip_special_tokens=True) == row["prompt"] + row["answer"]
    )
    assert tokenizer.decode(tokens[labels != IGNORED]) == row["answer"]
    assert set(labels[tokens == prepared.pad_token_id].tolist()) == {IGNORED}


def test_a_name_costs_no_further_pass_over_the_rows(kinds, tmp_path, monkeypatch):
    passes = []
    original = encoded_rows.rows_of_file
    monkeypatch.setattr(encoded_rows, "rows_of_file", lambda *said: passes.append(said) or original(*said))
    spec = DataSpec(path=write(tmp_path / "n.jsonl", [{"n": n} for n in range(60)]), kind="counts", held_out=0.3)
    for named in (spec, replace(spec, name="numbers", version="1")):
        prepared = prepare(named, cache_dir=tmp_path / "cache")
    assert len(passes) == 1
    manifest = RowManifest.read(Path(prepared.folder))
    assert [len(rows) for rows in manifest.rows.values()] == [prepared.num_samples, prepared.num_held_out]


def test_a_named_data_set_has_a_manifest_of_what_is_read(answers, tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    spec = DataSpec(kind="answers", path=path, name="qa", version="1", seq_len=40, vocab_size=280)
    prepared = prepare(spec, cache_dir=tmp_path)
    manifest = RowManifest.read(Path(prepared.folder))
    contents = [({name: row[name] for name in ("prompt", "answer")}, False) for row in ROWS]
    of_all = RowManifest.of(contents).rows["training"]
    assert sorted([*manifest.rows["training"], *manifest.rows["held_out"]]) == list(of_all)
    assert [row.number for row in data_source_of(spec).rows(spec)] == list(range(1, 61))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"path": None}, "none given with kind counts. To fix: give exactly one of path, dataset"),
        ({"source": "digits"}, "source and path given with kind counts"),
        ({"path": None, "factory": "a:b"}, "factory given with kind counts"),
        ({"kind": "constants"}, "path given with kind constants. To fix: give none of them"),
        ({"kind": "count"}, "unknown kind of data 'count': did you mean 'counts'"),
        ({"kind": "other"}, "entry point 'other' has the kind of data 'counts'"),
        ({"kwargs": {"colunm": "m"}}, "kind counts has no option 'colunm'. To fix: its options are: wrong, n_column"),
        (
            {"kwargs": {"n_column": "k"}},
            "has no column for n_column 'k'; its rows have m, n. To fix: set n_column to",
        ),
        ({"kwargs": {"wrong": 10}}, "numbers.jsonl, row 3: this is not a number of ours"),
        ({"held_out": 0.0001}, "holds no row to evaluate on. To fix: raise held_out"),
        ({"format": "text"}, "numbers.jsonl has no columns. To fix: give JSONL, CSV or Parquet for kind counts"),
    ],
)
def test_a_wrong_spec_says_what_to_do(kinds, numbers, tmp_path, changes, says):
    with pytest.raises(ValueError, match=says):
        prepare(replace(numbers, **changes), cache_dir=tmp_path)


def test_a_kind_may_bring_its_own_rows(kinds, tmp_path):
    training, held_out = open_data(DataSpec(kind="constants"), cache_dir=tmp_path)
    assert (len(training), len(held_out)) == (2, 1)


def test_built_in_kinds_come_first_and_are_not_shadowed(kinds):
    assert data_source_names() == (*data_source.BUILTIN_SOURCES, "counts", "constants", "other")
    assert type(data_source_named("digits")).__module__.endswith("sources.builtin")


def test_every_built_in_kind_bears_its_name():
    installed.cache_clear()
    assert [data_source_named(name).name for name in data_source.BUILTIN_SOURCES] == list(data_source.BUILTIN_SOURCES)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (DataSpec(path="x"), "language-modeling"),
        (DataSpec(dataset="x"), "hugging-face"),
        (DataSpec(factory="x:y"), "factory"),
        (DataSpec(source="digits"), "digits"),
        (DataSpec(kind="text", path="x"), "language-modeling"),
        (DataSpec(kind="language-modeling", dataset="x"), "hugging-face"),
    ],
)
def test_a_spec_without_a_kind_has_the_one_that_fits(spec, name):
    assert data_source_of(spec).name == name
