"""Limits of a batch file's size: a larger file is refused before it costs time or memory, with short faults."""

import json
from functools import partial
from pathlib import Path

import pytest

from ringmaster.errors import BatchFileError, InputError, ProblemError
from ringmaster.files import MAX_BYTES, is_file, path_in, text_of
from ringmaster.flows.entry import main
from ringmaster.tasks.batch import Batch, Fault, load_batch, parse_batch
from ringmaster.tasks.batch.grid import MAX_JOBS
from ringmaster.tasks.batch.parent_rules import circles_of
from ringmaster.text import MAX_FAULTS


def job(name: str, **more) -> dict:
    return {"name": name, "model": {"from_pretrained": "gpt2"}, "data": {"source": "digits"}, "num_steps": 1, **more}


def told(raw: dict) -> list[str]:
    with pytest.raises(BatchFileError) as caught:
        parse_batch(json.dumps(raw), folder=Path(), name="large.yaml")
    return [f"{fault.place}: {fault.message}" for fault in caught.value.faults]


def grid(name: str, num: int, **more) -> dict:
    return {"template": job(name, **more), "over": {"seed": list(range(num))}}


@pytest.fixture
def unexpanded(monkeypatch):
    """Fails a test in which a grid is expanded."""

    def expanded(*_, **__):
        raise AssertionError("a grid was expanded")

    monkeypatch.setattr("ringmaster.tasks.batch.grid.combinations", expanded)


def test_a_batch_of_too_many_jobs_is_refused_before_its_grids_are_expanded(unexpanded):
    raw = {"jobs": [job("a")], "grid": [grid("b", 2000) for _ in range(MAX_JOBS // 2000)]}
    assert told(raw) == ["grid: makes a batch of 10,001 jobs"]


def test_jobs_of_too_many_values_together_are_refused(unexpanded):
    config = {f"a{i}": i for i in range(1992)}
    assert told({"grid": [grid("b", 2000, model={"from_pretrained": "x", "config": config})]}) == [
        "grid: makes jobs of 4,000,000 values together"
    ]


def test_too_many_values_of_one_key_and_too_many_keys_are_refused_where_they_stand():
    assert told({"grid": [{"template": job("a"), "over": {"seed": [0] * 10_001}}]}) == [
        "grid[0].over: makes 10,001 jobs"
    ]
    over = {f"model.config.a{i}": [1] for i in range(60)}
    assert told({"grid": [{"template": job("a"), "over": over}]}) == ["grid[0].over: varies 60 keys"]


def test_jobs_from_python_are_counted_too(monkeypatch):
    parsed = parse_batch(json.dumps({"jobs": [job("a")]}), folder=Path(), name="x")
    monkeypatch.setattr("ringmaster.tasks.batch.grid.MAX_JOBS", 20)
    with pytest.raises(BatchFileError, match=r"makes a batch of 21 jobs\. To fix: keep to 20"):
        Batch.of(name="b", jobs=[parsed.jobs[0]] * 21)


def test_long_chains_of_bases_are_followed_in_time_and_circles_are_told_once():
    chain = {f"j{i}": {"base": f"j{i - 1}"} for i in range(1000)}
    assert circles_of(chain) == {}
    ring = {**chain, "j0": {"base": "j999"}}
    found = circles_of(ring)
    assert found["j0", "j999"][:2] == ["j0", "j999"] and found["j0", "j999"][-1] == "j0"
    small = {
        "a": {"base": "b"},
        "b": {"base": "a"},
        "c": {"base": "a"},
        "d": {"adaptation": {"parents": ["d", "a"]}},
        "e": {"base": "f"},
        "f": {"adaptation": {"teacher": "e", "parents": ["f", "c"]}},
    }
    assert circles_of(small) == {
        ("a", "b"): ["a", "b", "a"],
        ("b", "a"): [],
        ("d", "d"): ["d", "d"],
        ("e", "f"): ["e", "f", "e"],
        ("f", "e"): [],
        ("f", "f"): ["f", "f"],
    }


@pytest.mark.parametrize(
    "error",
    [
        BatchFileError([Fault("jobs", i, "is wrong", "mend it") for i in range(400)]),
        InputError([f"{i} is wrong" for i in range(400)]),
        ProblemError([f"{i} is wrong" for i in range(400)]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_fifty_faults_are_printed_and_the_others_counted(error, monkeypatch, capsys, tmp_path):
    def fails(**_):
        raise error

    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("ringmaster.flows.cli.app", fails)
    with pytest.raises(SystemExit) as ended:
        main()
    *_, last = lines = capsys.readouterr().err.splitlines()
    assert (ended.value.code, len(lines), last) == (2, MAX_FAULTS + 1, "and 350 more"), lines
    assert len(error.faults) == 400 and str(error).endswith("and 350 more")


def test_a_fault_is_one_line_of_reasonable_length_whatever_the_file_holds():
    said = str(Fault("a\x1b[31m\nb" * 1000, 3, "x\r" * 9000, "y" * 90_000, "f.yaml"))
    assert said.startswith("f.yaml:3: a\\x1b[31m\\nba\\x1b[31m")
    assert said.isprintable() and len(said) < 3500


def test_a_file_without_end_is_refused(tmp_path):
    with pytest.raises(BatchFileError, match="cannot be read"):
        load_batch(Path("/dev/zero"))
    (tmp_path / "large.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(OSError, match="more than 4 MB"):
        text_of(tmp_path / "large.yaml")


def test_devices_and_folders_that_a_file_names_are_no_files():
    assert told({"jobs": [job("a")], "datasets": "/dev/zero"}) == ["datasets: there is no file '/dev/zero'"]
    assert not any(is_file(Path(), name) for name in ("/dev/zero", "/tmp", "\0", "x" * 300, "~nobody-of-that-name/x"))
    with pytest.raises(ValueError, match="begins with a user"):
        path_in(Path(), "~nobody-of-that-name/x")


def test_a_number_with_hundreds_of_digits_is_refused():
    for text in ("1" * 5000, "0x" + "f" * 5000):
        with pytest.raises(BatchFileError, match=r"jobs.*seed: is a number of more than 300 digits"):
            parse_batch(f"jobs: [{{name: a, seed: {text}}}]", folder=Path(), name="x")


def retriever(name: str, *, num_steps: int = 4, refresh_every: int = 2) -> dict:
    mined = {"path": "words.jsonl", "refresh_every": refresh_every}
    return job(name, loss="contrastive", negatives=mined) | {"num_steps": num_steps}


def varying(name: str, **more) -> dict:
    evaluation, optimizer = {"every_steps": 1, "metrics": ["loss"]}, {"lr": 1e-3}
    target = {"metric": "loss", "at_most": 1.0}
    return job(name, target=target, evaluation=evaluation, optimizer=optimizer, may_vary=more) | {"num_steps": 1000}


def batch_of(*jobs: dict) -> dict:
    has_target = any("target" in each for each in jobs)
    return {"jobs": list(jobs)} | ({"objective": "time-to-target"} if has_target else {})


@pytest.fixture
def passages(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words.jsonl").write_text('{"text": "a b"}\n')


@pytest.mark.usefixtures("passages")
@pytest.mark.parametrize(
    ("maker", "made"),
    [
        (retriever("a"), "a.to-2"),
        (retriever("a"), "a.index-2"),
        (varying("a", lr=[1e-3, 1e-4]), "a.lr-0.0001"),
        (varying("a", global_batch_size=[16, 32]), "a.32.fp32"),
    ],
)
def test_the_name_of_a_job_that_another_one_makes_is_refused(maker: dict, made: str):
    assert told(batch_of(job(made), maker)) == [f"jobs[1].name: makes a job {made!r}, and another has that name"]


@pytest.mark.usefixtures("passages")
@pytest.mark.parametrize("make", [retriever, partial(varying, lr=[1e-3, 1e-4])])
def test_a_name_that_is_too_long_for_the_jobs_that_it_makes_is_refused(make):
    (fault,) = told(batch_of(make("a" * 100)))
    assert fault.startswith("jobs[0].name: makes a job 'aaa")


@pytest.mark.usefixtures("passages")
def test_jobs_that_make_too_many_jobs_are_refused_before_they_make_them():
    assert told({"jobs": [retriever("a", num_steps=1_000_000, refresh_every=1)]}) == [
        "jobs[0].negatives.refresh_every: is 1 of 1000000 steps, which makes more than 10,000 jobs"
    ]
    assert told({"jobs": [retriever(name, num_steps=2600, refresh_every=1) for name in "ab"]}) == [
        "jobs[1]: and the jobs before make a batch of 10,398 jobs"
    ]
    (fault,) = told(batch_of(varying("a", sync_every=list(range(1, 102)))))
    assert fault.startswith("jobs[0].may_vary.sync_every: ")


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        ({"data": {"source": "digits", "labels": ["a", "a"]}}, "data.labels", "has 'a' twice"),
        ({"data": {"source": "digits", "labels": ["a", ""]}}, "data.labels", "has an empty text at place 2"),
        ({"techniques": ["ddp", "ddp"]}, "techniques", "has 'ddp' twice"),
        ({"num_devices": [1, 1]}, "num_devices", "has 1 twice"),
        ({"num_devices": [2_000_000_000]}, "num_devices[0]", "must be at most 65536"),
        ({"evaluation": {"metrics": ["loss", "loss"]}}, "evaluation.metrics", "has 'loss' twice"),
        ({"evaluation": {"metrics": ["latency/../x"]}}, "evaluation.metrics[0]", "is not a plain path"),
        ({"evaluation": {"metrics": ["latency/p98_s"]}}, "evaluation.metrics[0]", "there is no 'p98_s'"),
        ({"evaluation": {"metrics": ["latency/"]}}, "evaluation.metrics[0]", "is not a plain path"),
        ({"evaluation": {"metrics": ["latency/p50_s/batch=0"]}}, "evaluation.metrics[0]", "'batch=0' is not an option"),
        ({"freeze": ["a.*", "b.*", "a.*"]}, "freeze", "has 'a.*' twice"),
        ({"evaluation": {"at_steps": [3, 3]}}, "evaluation.at_steps", "has 3 twice"),
        ({"may_vary": {"lr": [1e-3, 1e-3]}}, "may_vary.lr", "has 0.001 twice"),
        ({"may_vary": {"global_batch_size": [16, 32, 32]}}, "may_vary.global_batch_size", "has 32 twice"),
        ({"may_vary": {"precision": ["bf16", "bf16"]}}, "may_vary.precision", "has 'bf16' twice"),
        ({"may_vary": {"sync_every": [1, 8, 8]}}, "may_vary.sync_every", "has 8 twice"),
        (
            {
                "adaptation": {
                    "kind": "merged",
                    "method": "average",
                    "parents": ["models:/b/1", "models:/c/1", "models:/b/1"],
                }
            },
            "adaptation.parents",
            "has 'models:/b/1' twice",
        ),
        ({"evaluation": {"at_steps": [3, 11]}}, "evaluation.at_steps[1]", "is 11, and the job has 10 steps"),
        ({"model": {"config": {"hidden_size": -4}}}, "model.config.hidden_size", "must be at least 1"),
        ({"model": {"config": {"a": {"patch_size": 0}}}}, "model.config.a.patch_size", "must be at least 1"),
    ],
)
def test_what_no_job_can_mean_is_refused_where_it_stands(changes, place, words):
    job = {"name": "a", "model": {}, "data": {"source": "digits"}, "num_steps": 10, **changes}
    job["model"] = {"architecture": "ViTForImageClassification", **job["model"]}
    with pytest.raises(BatchFileError) as caught:
        parse_batch(json.dumps({"jobs": [job]}), folder=Path(), name="batch.yaml")
    (fault,) = [each for each in caught.value.faults if each.place == f"jobs[0].{place}"]
    assert words in fault.message
    assert fault.remedy
