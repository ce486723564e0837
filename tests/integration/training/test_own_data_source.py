"""A user's own kind of data from examples/custom, installed with an entry point, from a batch file to the weights."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ringmaster.codec import to_json
from ringmaster.errors import BatchFileError
from ringmaster.registry import installed
from ringmaster.tasks.batch import parse_batch
from ringmaster.tasks.profiling.profile_store import speed_key
from ringmaster.techniques.data import prepare
from ringmaster.techniques.probing import probe
from tests.integration.workbench import GPT2, LLAMA, SINGLE, Layout, largest_difference

ROOT = Path(__file__).parents[3]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder with a distribution that has the kind of data, on this process's import path."""
    site = tmp_path / "site"
    (site / "my_data-1.dist-info").mkdir(parents=True)
    shutil.copy(ROOT / "examples" / "custom" / "my_data_source.py", site)
    (site / "my_data-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: my-data\nVersion: 1\n")
    (site / "my_data-1.dist-info" / "entry_points.txt").write_text(
        "[ringmaster.data_sources]\nanswers = my_data_source:Answers\n"
    )
    monkeypatch.syspath_prepend(site)
    installed.cache_clear()
    yield site
    installed.cache_clear()
    sys.modules.pop("my_data_source", None)


@pytest.fixture
def folder(tmp_path):
    """The folder of a batch file with its questions."""
    rows = [{"prompt": f"what is {i} and {i % 7}?", "reply": f"{i + i % 7}, says it"} for i in range(200)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def batch_of(folder, *, datasets=None, **data):
    said = {"kind": "answers", "path": "questions.jsonl", "kwargs": {"answer_column": "reply"}, "seq_len": 40}
    job = {
        "name": "a",
        "model": {"architecture": LLAMA.architecture, "config": dict(LLAMA.config)},
        "data": {**said, "vocab_size": 300, **data},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "num_steps": 3,
        "global_batch_size": 8,
        "evaluation": {"max_batches": 1},
    }
    return parse_batch(json.dumps({"jobs": [job], "datasets": datasets or {}}), folder=folder, name="batch.yaml")


def test_it_trains_to_the_same_weights_on_one_device_and_on_two(site, folder, bench, tmp_path):
    (job,) = batch_of(folder).jobs
    assert job.data.kind == "answers"
    paths = (str(site),)
    one = bench.train(job, SINGLE, tmp_path / "one", import_paths=paths)
    two = bench.train(job, Layout("ddp", 2, {"micro_batch": 2}), tmp_path / "two", import_paths=paths)
    assert largest_difference(one.weights, two.weights) < 1e-6
    assert two.outcome.result.metrics == pytest.approx(one.outcome.result.metrics, rel=1e-4)
    assert (Path(one.order.model_dir) / "tokenizer.json").is_file()


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_it_is_probed_with_its_samples_and_with_made_up_ones(site, folder, bench, model):
    (job,) = batch_of(folder).jobs
    job = replace(job, model=model)
    data = prepare(job.data, cache_dir=bench.cache_dir)
    assert [tensor.name for tensor in data.tensors] == ["input_ids", "labels"]
    found = probe(job, data=data, cache_dir=bench.cache_dir)
    assert found.undivided == ""
    elsewhere = replace(data, digest="of another machine")
    assert probe(job, data=elsewhere, cache_dir=bench.cache_dir, is_there=False) == found


def test_a_changed_kind_has_another_speed(site, folder, bench):
    (job,) = batch_of(folder).jobs
    data = to_json(prepare(job.data, cache_dir=bench.cache_dir))
    before = speed_key(job, data, import_paths=(str(site),))
    with (site / "my_data_source.py").open("a") as file:
        file.write("# changed\n")
    assert speed_key(job, data, import_paths=(str(site),)) != before


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"kind": "anwers"}, "'anwers' is unknown. To fix: write `answers`, if that is meant"),
        ({"source": "digits"}, "has source and path. To fix: give exactly one of source, path"),
        ({"kind": None, "path": None, "kwargs": {}}, "has no source"),
        ({"kind": None, "path": None, "source": "digits"}, "are arguments for no factory or dataset or kind"),
    ],
)
def test_faults_are_told_at_their_places(site, folder, changes, fault):
    with pytest.raises(BatchFileError, match=fault):
        batch_of(folder, **changes)


def test_rows_of_a_named_data_set_are_checked_by_what_it_reads(site, folder):
    row = {"prompt": "what is 3 and 3?", "reply": "6, says it", "id": "another"}
    (folder / "test.jsonl").write_text(json.dumps(row) + "\n")
    qa = {"splits": {"train": "questions.jsonl", "test": "test.jsonl"}}
    named = {"path": None, "name": "qa", "held_out_split": "test"}
    with pytest.raises(BatchFileError, match=r"1 row of the evaluation split .*test.jsonl, line 1, which .*, line 4"):
        batch_of(folder, datasets={"qa": qa}, **named)
    (folder / "test.jsonl").write_text(json.dumps({**row, "reply": "7"}) + "\n")
    (job,) = batch_of(folder, datasets={"qa": qa}, **named).jobs
    assert (job.data.name, job.data.kind) == ("qa", "answers")


def test_where_it_is_not_installed_it_is_unknown(folder):
    with pytest.raises(BatchFileError, match=r"'answers' is unknown\. To fix: use one of chat, command, comparison"):
        batch_of(folder)
