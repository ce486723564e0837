"""Requests of users to a pool: batches found by name, answers, and refusals that list what exists."""

import json
import queue
from contextlib import suppress
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from ringmaster.errors import BatchFileError, InputError
from ringmaster.flows import cli, entry
from ringmaster.flows.batch.batch_input import MAX_PARAMETER_BYTES, as_batch, as_parameter, batch_in_file
from ringmaster.flows.batch.run_folder import exclusive_lock
from ringmaster.flows.pool import batch_requests
from ringmaster.flows.pool.batch_requests import NO_POOL, ask_about, meant
from ringmaster.flows.settings import EXAMPLES
from ringmaster.tasks.background_worker import background_thread
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.control.batch_terms import ALONE, ActiveBatch
from ringmaster.tasks.control.request_handler import RequestHandler
from ringmaster.tasks.control.requests import RequestKind, Requests, RequestStatus
from ringmaster.tasks.planning.objectives import PlanningTerms
from ringmaster.tasks.pool.submissions import Submission, Submissions
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import JobStatus, Journal, begin_jobs
from ringmaster.tasks.storage.quarantine import Quarantine
from ringmaster.techniques import DataSpec, Job, ModelSpec
from tests.unit.execution.fakes import Bench, job, profile
from tests.unit.flows.pool.standing_pool import played


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """The database of a pool whose home is set for the test."""
    for variable in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    url = file_url(tmp_path / "pool.db")
    address = {"database": url, "prefect_api": "http://127.0.0.1:1/api", "mlflow_uri": "http://127.0.0.1:2"}
    (tmp_path / "pool.json").write_text(json.dumps(address))
    database = Database(url, synced=False)
    yield database
    database.close()


def submit(database, key, *, name="nightly", jobs=("a", "b"), folder="/runs"):
    made = tuple(job(each) for each in jobs)
    profiles = {each.name: (profile(),) for each in made}
    Submissions(database).submit(
        Submission(id=key, name=name, jobs=made, profiles=profiles, folder=folder, cache_dir="/cache")
    )


def statuses(database, key):
    return {name: record.status for name, record in Journal(database, batch=key).jobs().items()}


@pytest.mark.parametrize(
    ("kind", "status"), [(RequestKind.CANCEL, JobStatus.CANCELLED), (RequestKind.PAUSE, JobStatus.PAUSED)]
)
def test_all_standing_batches_of_a_name_are_meant_and_an_id_names_one(pool, kind, status):
    for key in ("nightly-1", "nightly-2"):
        submit(pool, key)
    with played(pool, held_back={"a", "b"}):
        (answer,) = ask_about(pool, kind, batch="nightly-2", jobs=["a"])
        assert statuses(pool, "nightly-1") == {"a": JobStatus.WAITING, "b": JobStatus.WAITING}
        assert statuses(pool, "nightly-2") == {"a": status, "b": JobStatus.WAITING}
        assert (answer.batch, answer.is_done, answer.message) == ("nightly-2", True, f"{kind}: a")
        answers = ask_about(pool, kind, batch="nightly")
        assert [each.batch for each in answers] == ["nightly-1", "nightly-2"]


def test_what_is_not_there_is_refused_with_what_is(pool):
    submit(pool, "nightly-1")
    with pytest.raises(InputError, match=r"no batch 'nigthly'; active batches: nightly \(nightly-1\)"):
        meant(pool, batch="nigthly", jobs=[])
    with pytest.raises(InputError, match="has no job c; it has a, b"):
        meant(pool, batch="nightly", jobs=["a", "c"])
    Submissions(pool).end("nightly-1")
    with pytest.raises(InputError, match="'nightly' has ended; active batches: none"):
        meant(pool, batch="nightly", jobs=[])


def test_each_batch_is_asked_about_its_own_jobs(pool):
    submit(pool, "nightly-1", jobs=("a", "b"))
    submit(pool, "nightly-2", jobs=("b", "c"))
    assert meant(pool, batch="nightly", jobs=["b", "c"]) == {"nightly-1": ["b"], "nightly-2": ["b", "c"]}
    assert meant(pool, batch="nightly", jobs=["a"]) == {"nightly-1": ["a"]}


def test_without_an_executor_the_request_stands(pool):
    submit(pool, "nightly-1")
    (answer,) = ask_about(pool, RequestKind.PAUSE, batch="nightly", timeout_s=0.0)
    assert not answer.is_done
    assert "ringmaster pool controller" in answer.message
    assert len(Requests(pool).open(RequestKind.PAUSE)) == 1


def run(*arguments):
    """Runs a command. Returns its exit code and its output as `main` does."""
    try:
        done = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    except InputError as error:
        return entry.INPUT_FAULT, "\n".join(error.faults)
    return done.exit_code, done.output


def test_the_commands_ask_and_print_the_answer(pool):
    submit(pool, "nightly-1")
    with played(pool, held_back={"a", "b"}):
        assert run("jobs", "pause", "nightly", "a") == (0, "nightly-1: pause: a\n")
        assert run("jobs", "resume", "nightly") == (0, "nightly-1: resume: a, b\n")
        assert run("jobs", "set", "nightly", "b", "priority=2.5") == (0, "nightly-1: set: b\n")
        code, output = run("jobs", "cancel", "nightly", "--json")
        assert (code, json.loads(output)) == (
            0,
            [{"batch": "nightly-1", "is_done": True, "message": "cancel: a, b"}],
        )
    (asked,) = [r for r in Requests(pool).open(status=RequestStatus.DONE) if r.kind == RequestKind.SET]
    assert asked.content == {"batch": "nightly-1", "jobs": ["b"], "settings": {"priority": 2.5}}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("jobs", "cancel", "other"), "there is no batch 'other'; active batches: nightly (nightly-1)"),
        (("jobs", "set", "nightly", "priority=0"), "priority must be a number above 0"),
        (("jobs", "set", "nightly", "steps=1.5", "colour=3"), "colour cannot be set"),
        (("jobs", "clone", "nightly", "c"), "batch nightly has no job c; it has a, b"),
        (("jobs", "clone", "nightly", "a", "--set", "seed"), "'seed' is not KEY=VALUE"),
        (("jobs", "clone", "nightly", "a", "--set", "seed=[1"), "'seed=[1' is not KEY=VALUE"),
        (("jobs", "clone", "nightly", "a", "--set", f"seed={'1' * 5000}"), "is not KEY=VALUE"),
        (("jobs", "clone", "nightly", "a", "--set", "seed=1", "--set", "seed=2"), "seed is given twice"),
        (("jobs", "set", "nightly", "steps=null"), "steps must be a whole number above 0, got None"),
        (("submit", "missing.yaml", "--batch", "a/b"), "'a/b' is not a valid name"),
    ],
)
def test_what_is_wrong_is_told_with_exit_code_2(pool, arguments, told):
    submit(pool, "nightly-1")
    code, output = run(*arguments)
    assert code == entry.INPUT_FAULT
    assert told in output


@pytest.mark.parametrize("command", ["cancel", "pause", "resume"])
def test_without_a_pool_it_is_told_how_to_have_one(tmp_path, monkeypatch, command):
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    monkeypatch.delenv("RINGMASTER_DATABASE", raising=False)
    assert run("jobs", command, "nightly") == (entry.INPUT_FAULT, NO_POOL)


@pytest.fixture
def run_here(tmp_path, monkeypatch):
    """A run of the batch `nightly` that runs on this machine: an executor that answers, and its folder."""
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    for variable in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "RINGMASTER_DATABASE"):
        monkeypatch.delenv(variable, raising=False)
    folder = tmp_path / "batches" / "nightly" / "1"
    folder.mkdir(parents=True)
    vit = ModelSpec(architecture="ViTForImageClassification", config={"image_size": 8, "patch_size": 2})
    jobs = [Job(name=name, model=vit, data=DataSpec(source="digits"), num_steps=20) for name in "ab"]
    bench = Bench(folder, jobs)
    begin_jobs(bench.journal, jobs, faults={})
    bench.executor.job_table._read(bench.executor.job_table.entries)
    bench.journal.put("batch", Batch.of(name="nightly", jobs=jobs, folder=tmp_path).to_json())
    alone = ActiveBatch(id=ALONE, name="nightly", job_names=("a", "b"), given=PlanningTerms(), started_s=0.0)
    standing, inbox = {ALONE: alone}, queue.SimpleQueue()
    bench.executor._inbox = inbox
    handler = RequestHandler(
        bench.journal.database,
        executor=bench.executor,
        active_batches=standing,
        quarantine=Quarantine(bench.journal.database),
        on_terms=lambda active, why: standing.update({ALONE: active}),
    )

    def work(over):
        while not over.is_set():
            with suppress(queue.Empty):
                inbox.get(timeout=0.05)[1]()

    bench.standing = standing
    with (
        exclusive_lock(folder),
        background_thread(handler.keep_answering, name="requests"),
        background_thread(work, name="executor"),
    ):
        yield bench


def test_without_a_pool_the_run_on_this_machine_is_controlled(run_here):
    checkpoint = run_here.paths.folder / "checkpoints" / "a" / "step-00000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    code, output = run("jobs", "clone", "nightly", "a", "--set", "optimizer.lr=5e-4", "--warm", "--dry-run")
    assert (code, list(run_here.statuses)) == (0, ["a", "b"])
    assert "after step 10 the learning rate jumps from 0.001 to 0.0005" in output
    code, output = run("jobs", "clone", "nightly", "a", "--set", "optimizer.lr=5e-4", "--warm")
    assert (code, "To fix: add --yes" in output) == (entry.INPUT_FAULT, True)
    code, output = run("jobs", "clone", "nightly", "a", "--set", "optimizer.lr=5e-4", "--warm", "--yes")
    assert "a-clone1: a clone of a from its checkpoint of step 10" in " ".join(output.split())
    clone = run_here.executor.job_table.entries["a-clone1"].job
    assert (clone.optimizer.lr, clone.started_from.step, run_here.journal.jobs()["a-clone1"].step) == (5e-4, 10, 10)
    assert (run_here.paths.folder / "checkpoints" / "a-clone1" / "start" / "step-00000010").is_dir()
    assert run("jobs", "pause", "nightly", "b") == (0, "nightly: paused: b of batch nightly\n")
    code, output = run("jobs", "set", "nightly", "a", "steps=30", "weight=2", "deadline=60")
    assert (code, run_here.executor.job_table.entries["a"].job.num_steps) == (0, 30)
    terms = run_here.standing[ALONE].terms
    assert (terms.weights, terms.deadlines_s) == ({"a": 2.0}, {"a": 60.0})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("clone", "nightly", "a", "--set", "optimizer.lr=-1", "--at-step", "3"), "a step is for a warm clone"),
        (("clone", "nightly", "a", "--set", "optimizer.lr=-1"), "optimizer.lr"),
        (("clone", "nightly", "a", "--set", "precision=bf16"), "precision is unknown or changes the speed or size"),
        (("clone", "nightly", "a", "--set", "seed=null", "--set", "num_steps.0=3"), "num_steps.0: lies inside"),
        (("clone", "nightly", "a", "--set", "seed=null", "--set", "num_steps.0=3"), "seed: must be a whole number"),
        (("clone", "nightly", "a", "--set", "optimizer.lr=2026-01-01"), "must be a number, got '2026-01-01'"),
        (("clone", "nightly", "a", "--warm"), "a has no checkpoint yet"),
        (("set", "nightly", "c", "steps=30"), "batch nightly has no job c; it has a, b"),
        (("pause", "other"), NO_POOL),
    ],
)
def test_what_a_run_on_this_machine_cannot_do_is_refused(run_here, arguments, told):
    code, output = run("jobs", *arguments)
    assert (code, told in output) == (entry.INPUT_FAULT, True), output


def test_status_and_logs_look_at_batches_of_the_pool(pool, tmp_path):
    folder = tmp_path / "batches" / "nightly" / "1"
    submit(pool, "nightly-1", folder=str(folder))
    gang = folder / "gangs" / "0007-a"
    gang.mkdir(parents=True)
    (gang / "rank-0.log").write_text("step 1\n")
    code, output = run("status", "nightly", "--json")
    assert code == 0
    assert [(row["run"], row["job"], row["status"]) for row in json.loads(output)] == [
        ("nightly-1", "a", JobStatus.WAITING),
        ("nightly-1", "b", JobStatus.WAITING),
    ]
    assert run("logs", "a") == (0, "step 1\n")
    (gang / "rank-0.log").write_text("")
    assert run("logs", "a") == (0, "rank 0 of a has printed nothing in its last segment\n")


def test_status_shows_all_that_stands_and_the_newest_of_what_has_ended(pool):
    for key in ("nightly-1", "nightly-2", "nightly-3"):
        submit(pool, key, jobs=("a",))
    Submissions(pool).end("nightly-1")
    Submissions(pool).end("nightly-3")
    _, output = run("status", "--json")
    assert [row["run"] for row in json.loads(output)] == ["nightly-2", "nightly-3"]


def test_a_batch_is_in_the_pools_database_before_submit_says_so(pool, monkeypatch):
    """Submitting needs neither a controller nor Prefect, whose address is unreachable here."""
    with monkeypatch.context() as hasty:
        hasty.setattr(batch_requests, "ANSWER_TIMEOUT_S", 0.0)
        code, output = run("submit", str(EXAMPLES / "tiny_batch.yaml"), "--batch", "nightly", "--json", "--unchecked")
    assert code == 0
    assert "is handed over" in output and "once a controller leads" in output
    said = json.loads(output[output.index("{") :])
    assert (said["batch"], said["flow_run"]) == ("nightly", None)
    (request,) = Requests(pool).open(RequestKind.TRAIN)
    assert [job["name"] for job in request.content["batch"]["jobs"]] == said["jobs"]
    _, output = run("status", "nightly", "--json")
    assert [(row["job"], row["status"]) for row in json.loads(output)] == [(job, "handed over") for job in said["jobs"]]
    with played(pool):
        Requests(pool).wait(request.id)
        code, output = run("submit", str(EXAMPLES / "tiny_batch.yaml"), "--batch", "nightly", "--unchecked")
    assert "/runs/flow-run/run-2" in output.replace("\n", "")


@pytest.mark.full
def test_what_cannot_take_a_step_is_not_handed_over(pool, tmp_path):
    text = (EXAMPLES / "tiny_batch.yaml").read_text().replace("hidden_size: 64", "hidden_size: 63, hiden_size: 64")
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    code, output = run("submit", str(file), "--batch", "nightly")
    assert code == 2
    assert "job llama: " in output and "no field hiden_size; did you mean hidden_size" in output
    assert not Requests(pool).open(RequestKind.TRAIN)


def test_a_batch_is_handed_over_in_a_file_with_its_paths_resolved(pool, tmp_path):
    batch = Batch(name="nightly", jobs=(job("a"),), folder=tmp_path, text="jobs: []\n", weights={"a": 2.0})
    file = batch_in_file(batch)
    assert file.parent == tmp_path / "batches" / "nightly"
    assert as_batch(str(file)) == batch
    (tmp_path / "no.json").write_text("{")
    with pytest.raises(BatchFileError):
        as_batch(str(tmp_path / "no.json"))


def test_a_batch_too_long_for_a_parameter_of_a_flow_run_is_one_by_its_file(pool, tmp_path):
    """Prefect's server refuses parameters of more than 512 KiB, which some four hundred jobs have."""
    few = Batch(name="nightly", jobs=(job("a"),), folder=tmp_path, text="")
    assert as_parameter(few) == few.to_json()
    many = replace(few, jobs=tuple(job(f"j{number}") for number in range(800)))
    given = as_parameter(many)
    assert len(json.dumps(given)) < MAX_PARAMETER_BYTES
    assert as_batch(given) == many
