"""Named data sets in a batch file: the data that jobs get, and errors that report all faults at once."""

import json
from pathlib import Path

import fsspec
import pytest

from ringmaster.errors import BatchFileError
from ringmaster.tasks.batch import Batch, load_batch

JOB = """
  - name: {name}
    model: {{architecture: GPT2LMHeadModel}}
    num_steps: 3
    data: {data}
"""


def write_rows(file: Path, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def row(number, **more):
    return {"text": f"row number {number}", "stars": number % 5, "at": f"2026-01-{1 + number % 28:02}", **more}


@pytest.fixture
def folder(tmp_path):
    write_rows(tmp_path / "train.jsonl", [row(n) for n in range(40)])
    write_rows(tmp_path / "test.jsonl", [row(n) for n in range(40, 50)])
    return tmp_path


SETS = """
datasets:
  reviews:
    columns: {text: text, stars: integer, at: time}
    time_column: at
    held_out_split: test
    versions:
      1: {path: train.jsonl}
      2: {splits: {train: train.jsonl, test: test.jsonl}}
"""


def load(folder, sets, *data):
    jobs = "".join(JOB.format(name=f"job{i}", data=said) for i, said in enumerate(data))
    (folder / "batch.yaml").write_text(f"{sets}\njobs:{jobs}")
    return load_batch(folder / "batch.yaml")


def faults(folder, sets, *data):
    with pytest.raises(BatchFileError) as caught:
        load(folder, sets, *data)
    return list(caught.value.faults)


def test_a_name_becomes_files(folder):
    one, two, part = load(
        folder,
        SETS,
        "{name: reviews, version: 1, seq_len: 8}",
        "{name: reviews, version: latest, seq_len: 8}",
        "{name: reviews, split: test, held_out_split: train, window: {last_rows: 3}, seq_len: 8}",
    ).jobs
    assert (one.data.path, one.data.held_out_path, one.data.version) == (str(folder / "train.jsonl"), None, "1")
    assert (two.data.path, two.data.held_out_path) == (str(folder / "train.jsonl"), str(folder / "test.jsonl"))
    assert (two.data.version, two.data.split, two.data.held_out_split) == ("2", "train", "test")
    assert (part.data.path, part.data.window) == (str(folder / "test.jsonl"), {"last_rows": 3})
    assert {job.data.name for job in (one, two, part)} == {"reviews"}
    assert two.data.time_column == "at"


def test_a_catalogue_beside_a_batch_file_is_found_and_one_elsewhere_is_named(folder):
    (folder / "datasets.yaml").write_text(SETS)
    assert load(folder, "", "{name: reviews, seq_len: 8}").jobs[0].data.version == "2"
    (folder / "sets").mkdir()
    (folder / "datasets.yaml").rename(folder / "sets" / "ours.yaml")
    write_rows(folder / "sets" / "train.jsonl", [row(n) for n in range(60)])
    (job,) = load(folder, "datasets: sets/ours.yaml", "{name: reviews, version: 1, seq_len: 8}").jobs
    assert job.data.path == str(folder / "sets" / "train.jsonl"), "its paths start in its own folder"


def test_what_a_batch_file_says_goes_before_the_catalogue_beside_it(folder):
    (folder / "datasets.yaml").write_text(SETS)
    sets = "datasets: {reviews: {path: test.jsonl}}"
    assert load(folder, sets, "{name: reviews, seq_len: 8}").jobs[0].data.path == str(folder / "test.jsonl")


def test_jobs_that_have_their_files_are_left_alone(folder):
    batch = load(folder, SETS, "{name: reviews, seq_len: 8}")
    again = Batch.of(name=batch.name, jobs=batch.jobs, folder=folder / "elsewhere")
    assert again.jobs == batch.jobs


def test_every_fault_of_names_and_rows_is_told_at_once(folder):
    write_rows(folder / "wrong.jsonl", [row(1), row(2, stars="two"), row(3, stars="three"), {"text": "no more"}])
    write_rows(folder / "leaky.jsonl", [row(100), row(7)])
    (folder / "empty.jsonl").touch()
    sets = """
datasets:
  reviews: {time_column: at, versions: {1: {splits: {train: train.jsonl, test: test.jsonl, none: empty.jsonl}}}}
  wrong: {columns: {text: text, stars: integer, at: "time?"}, path: wrong.jsonl}
  leaky: {splits: {train: train.jsonl, test: leaky.jsonl}, held_out_split: test}
  gone: {path: gone/*.jsonl}
  away: {path: "memory://no/such.jsonl"}
  none: {}
"""
    told = faults(
        folder,
        sets,
        "{name: review, seq_len: 8}",
        "{name: reviews, version: 3, seq_len: 8}",
        "{name: reviews, split: dev, seq_len: 8}",
        "{name: reviews, split: none, seq_len: 8}",
        "{name: reviews, window: {since: 2027-01-01}, seq_len: 8}",
        "{name: reviews, held_out_split: none, seq_len: 8}",
        "{name: wrong, seq_len: 8}",
        "{name: leaky, seq_len: 8}",
        "{name: gone, seq_len: 8}",
        "{name: away, seq_len: 8}",
        "{name: reviews, window: {last_days: 2, last_rows: 2}, held_out: 0, seq_len: 8}",
        "{source: digits, version: 2}",
    )
    said = {fault.place: f"{fault.message}. To fix: {fault.remedy}" for fault in told}
    assert len(told) == 13
    assert "does not say where its files are" in said["datasets.none"]
    assert "did you mean `reviews`?" in said["jobs[0].data.name"]
    assert "data set reviews has no version 3. To fix: its versions are 1" in said["jobs[1].data.version"]
    assert "has no split 'dev'. To fix: its splits are none, test, train" in said["jobs[2].data.split"]
    assert "there is no row to train on" in said["jobs[3].data.name"]
    assert "no row lies in the window" in said["jobs[4].data.name"]
    assert "split none has no row" in said["jobs[5].data.name"]
    wrong = said["jobs[6].data.name"]
    assert "wrong.jsonl, line 2: column 'stars' must be a whole number, got 'two' (and 2 rows more)" in wrong
    leak = said["jobs[7].data.name"]
    assert "1 row of the evaluation split are among those that are trained on" in leak
    assert f"the first at {folder / 'leaky.jsonl'}, line 2, which is {folder / 'train.jsonl'}, line 8" in leak
    assert "gone/*.jsonl' matches no file" in said["jobs[8].data.name"]
    assert "memory://no/such.jsonl matches no file" in said["jobs[9].data.name"]
    assert "has last_days and last_rows" in said["jobs[10].data.window"]
    assert "goes with files" in said["jobs[11].data.version"]
    assert all(fault.line for fault in told)


def test_content_that_has_changed_is_told_by_its_fingerprint(folder):
    from ringmaster.tasks.datasets.catalogue import read_catalogue
    from ringmaster.tasks.datasets.checking import contents, fingerprint

    (folder / "datasets.yaml").write_text("datasets: {reviews: {path: train.jsonl}}")
    catalogue, _ = read_catalogue(folder / "datasets.yaml")
    there = fingerprint(contents(catalogue.entries["reviews"], "1"))
    sets = f"datasets: {{reviews: {{path: train.jsonl, digest: '{there}'}}}}"
    assert load(folder, sets, "{name: reviews, seq_len: 8}").jobs
    lines = (folder / "train.jsonl").read_text().splitlines()
    (folder / "train.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    assert load(folder, sets, "{name: reviews, seq_len: 8}").jobs, "the order of rows is not a content"
    write_rows(folder / "train.jsonl", [row(n) for n in range(39)])
    (told,) = faults(folder, sets, "{name: reviews, seq_len: 8}")
    assert f"and not {there}: it has changed" in told.message


def test_a_store_that_fsspec_reaches(folder):
    with fsspec.open("memory://bucket/a.jsonl", "w") as file:
        file.write((folder / "train.jsonl").read_text())
    sets = """
datasets:
  reviews: {columns: {text: text, stars: text}, path: "memory://bucket/*.jsonl"}
  strange: {path: "nosuch://bucket/a.jsonl"}
"""
    told = faults(folder, sets, "{name: reviews, seq_len: 8}", "{name: strange, seq_len: 8}")
    assert "memory://bucket/a.jsonl, line 1: column 'stars' must be text, got 0 (and 39 rows more)" in told[0].message
    assert "nosuch" in told[1].message


def test_a_grid_may_vary_versions(folder):
    text = f"""{SETS}
grid:
  - template:
      name: each
      model: {{architecture: GPT2LMHeadModel}}
      num_steps: 3
      data: {{name: reviews, seq_len: 8}}
    over: {{data.version: [1, 2]}}
"""
    (folder / "batch.yaml").write_text(text)
    assert [job.data.version for job in load_batch(folder / "batch.yaml").jobs] == ["1", "2"]
    (folder / "batch.yaml").write_text(text.replace("[1, 2]", "[1, 5]"))
    with pytest.raises(BatchFileError, match=r"grid\[0\]\.over\.data\.version\[1\]: data set reviews has no version 5"):
        load_batch(folder / "batch.yaml")


@pytest.mark.parametrize("said", ["5", "[a]", "{reviews: 5}", "{reviews: {pth: a.jsonl}}", "missing.yaml"])
def test_a_catalogue_of_the_wrong_shape_is_told(folder, said):
    assert faults(folder, f"datasets: {said}", "{source: digits}")
