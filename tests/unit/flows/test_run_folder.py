"""The run that `--resume` continues. A run that was killed before it began has nothing to resume."""

from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load, save
from typer.testing import CliRunner

from ringmaster.errors import InputError
from ringmaster.flows.batch import dry_run as dry_runs
from ringmaster.flows.batch.run_folder import (
    begun_batch,
    exclusive_lock,
    folder_of_flow_run,
    folder_to_resume,
    mark_started,
    mark_starting,
    plain_models,
    resumed_batch,
    share_models,
)
from ringmaster.flows.dated_runs import stamped_folder
from ringmaster.model_lineage.tensors import TensorStore
from ringmaster.model_lineage.tensors.references import FileReference
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import Journal
from ringmaster.techniques import EvaluationSpec
from tests.unit.execution.fakes import job
from tests.unit.pool.bench import submission

BATCH = Batch(name="nightly", jobs=(job("a"),), folder=Path("/batches"), text="name: nightly\n")


def run(home, *, status, batch=BATCH):
    """Makes a run that has begun. Returns its folder."""
    mark_starting(batch, home)
    folder = stamped_folder(home / "batches" / batch.name)
    journal = Journal.of_file(folder / "journal.db")
    journal.put_all({"batch": batch.to_json(), "status": status})
    journal.write_job("a", model_uri="models:/nightly.a/1" if status == "done" else None)
    journal.close()
    mark_started(batch, home)
    return folder


def killed_at_once(home):
    """Makes a run that was killed before it had a folder."""
    mark_starting(BATCH, home)


def killed_before_it_knew_its_jobs(home):
    """Makes a run that was killed with a folder and an empty journal."""
    mark_starting(BATCH, home)
    Journal.of_file(stamped_folder(home / "batches" / BATCH.name) / "journal.db").close()


def killed_before_its_journal(home):
    """Makes a run that was killed with an empty folder."""
    mark_starting(BATCH, home)
    stamped_folder(home / "batches" / BATCH.name)


KILLED = (killed_at_once, killed_before_its_journal, killed_before_it_knew_its_jobs)


@pytest.mark.parametrize("killed", [lambda home: None, *KILLED])
def test_where_nothing_has_begun_there_is_nothing_to_resume(killed, tmp_path):
    killed(tmp_path)
    assert folder_to_resume(BATCH, tmp_path) is None


@pytest.mark.parametrize("killed", KILLED)
def test_one_that_was_killed_before_it_began_is_started_though_the_one_before_is_done(killed, tmp_path):
    run(tmp_path, status="done")
    killed(tmp_path)
    assert folder_to_resume(BATCH, tmp_path) is None


@pytest.mark.parametrize("killed", KILLED)
def test_one_that_was_killed_before_it_began_does_not_hide_what_an_earlier_one_has_trained(killed, tmp_path):
    folder = run(tmp_path, status="interrupted")
    killed(tmp_path)
    assert folder_to_resume(BATCH, tmp_path) == folder


def test_one_that_an_earlier_release_began_goes_on_with_its_limit_of_evaluations(tmp_path):
    old = replace(BATCH, jobs=tuple(replace(job, evaluation=EvaluationSpec(max_batches=16)) for job in BATCH.jobs))
    folder = run(tmp_path, status="interrupted", batch=old)
    assert folder_to_resume(BATCH, tmp_path) == folder
    assert begun_batch(folder) == old
    changed = replace(BATCH, jobs=tuple(replace(job, seed=7) for job in BATCH.jobs))
    with pytest.raises(InputError, match="the batch file has changed"):
        folder_to_resume(changed, tmp_path)


def test_one_that_this_release_began_is_not_resumed_with_other_rows(tmp_path):
    run(tmp_path, status="interrupted")
    changed = replace(BATCH, jobs=tuple(replace(job, evaluation=EvaluationSpec(max_rows=9)) for job in BATCH.jobs))
    with pytest.raises(InputError, match="the batch file has changed"):
        folder_to_resume(changed, tmp_path)


def test_one_whose_records_another_mlflow_had_is_resumed_to_record_them_again(tmp_path):
    folder = run(tmp_path, status="done")
    with closing(Journal.of_file(folder / "journal.db")) as journal:
        journal.put("is_recorded", True)
        journal.write_job("a", model_uri=None)
    assert folder_to_resume(BATCH, tmp_path) == folder


@pytest.mark.parametrize(
    ("own", "status", "is_changed", "is_told"),
    [
        ("x", "interrupted", False, False),
        ("x", "interrupted", True, True),
        ("y", "interrupted", True, False),
        ("x", "done", True, False),
    ],
)
def test_a_flow_run_that_is_retried_with_a_changed_file_says_so(tmp_path, own, status, is_changed, is_told):
    folder, notices = run(tmp_path, status=status), []
    with closing(Journal.of_file(folder / "journal.db")) as journal:
        journal.put_all({"flow_runs": ["root", "x"], "is_over": True})
    batch = replace(BATCH, text="name: nightly  # changed\n") if is_changed else BATCH
    found = folder_of_flow_run(batch, tmp_path, ["root", own], notice=notices.append)
    assert found == (None if is_changed else folder)
    assert [str(folder) in notice and "all jobs are trained afresh" in notice for notice in notices] == [True] * is_told


def plain_run(home, *, weights=b"weights", **changes):
    """Makes a run with a model of plain weights. Returns the model's folder."""
    folder = run(home, status="done")
    with closing(Journal.of_file(folder / "journal.db")) as journal:
        journal.put_all({"is_recorded": True, **changes})
    model = folder / "models" / "a"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(weights)
    return model


def test_plain_weights_of_runs_that_are_done_and_recorded_are_shared_but_those_of_the_newest(tmp_path):
    first, newest = plain_run(tmp_path), plain_run(tmp_path)
    plain_run(tmp_path, status="interrupted")
    plain_run(tmp_path, is_recorded=False)
    batches = [tmp_path / "batches" / "nightly"]
    assert list(plain_models(batches, home=tmp_path)) == [first, newest]
    assert list(plain_models(batches, home=tmp_path, keep=3)) == [first]
    assert list(plain_models(batches, home=tmp_path, before_s=0)) == []
    with exclusive_lock(first.parents[1]):
        assert list(plain_models(batches, home=tmp_path)) == [newest], "another process resumes the first one"


@pytest.mark.parametrize(
    ("num_plain", "kept"), [(None, {"0", "1", "2"}), ("0", set()), ("1", {"2"}), ("2", {"1", "2"})]
)
def test_weights_of_runs_stay_plain_unless_a_setting_says_that_the_store_alone_has_them(
    tmp_path, monkeypatch, num_plain, kept
):
    store, models = TensorStore(tmp_path / "tensors"), {}
    for name in "012":
        models[name] = plain_run(tmp_path, weights=save({"w": np.arange(9) + int(name)}))
        store.add(models[name])
    before = {name: model.stat().st_ino for name, model in models.items()}
    if num_plain is not None:
        monkeypatch.setenv("RINGMASTER_PLAIN_RUNS", num_plain)
    said = []
    share_models(models["2"].parents[1], home=tmp_path, say=said.append)
    assert {name for name, model in models.items() if (model / "model.safetensors").exists()} == kept
    assert {name: model.stat().st_ino for name, model in models.items()} == before
    for name, model in models.items():
        if name not in kept:
            reference = FileReference.at(model / "model.safetensors")
            assert reference is not None
            store.unshare(model)
            assert FileReference.at(model / "model.safetensors") is None
        assert load((model / "model.safetensors").read_bytes())["w"][0] == int(name)
    undo = "are references to the tensor store now, which `from_pretrained` does not read. To undo: `ringmaster lineage"
    assert [undo in text for text in said] == ([] if num_plain is None else [True])


def test_a_number_of_plain_runs_that_is_none_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("RINGMASTER_PLAIN_RUNS", "few")
    with pytest.raises(InputError, match="RINGMASTER_PLAIN_RUNS=few must be a number of runs"):
        share_models(tmp_path / "run", home=tmp_path, say=print)


def test_a_run_of_a_pool_is_shared_too_though_the_pool_is_down(tmp_path):
    run_folder = stamped_folder(tmp_path / "batches" / BATCH.name)
    (run_folder / "models" / "a").mkdir(parents=True)
    (run_folder / "models" / "a" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "pool").mkdir()
    with closing(Database(file_url(tmp_path / "pool" / "pool.db"))) as database:
        Submissions(database).submit(replace(submission("nightly"), folder=str(run_folder)))
        journal = Journal(database, batch="nightly")
        assert list(plain_models([run_folder.parent], home=tmp_path)) == []
        journal.put_all({"status": "done", "is_recorded": True})
    assert list(plain_models([run_folder.parent], home=tmp_path)) == [run_folder / "models" / "a"]


def test_what_is_done_or_of_another_file_is_refused(tmp_path):
    run(tmp_path, status="done")
    with pytest.raises(InputError, match="is done"):
        folder_to_resume(BATCH, tmp_path)
    other = Batch(name="nightly", jobs=(job("b"),), folder=Path("/batches"), text="")
    with pytest.raises(InputError, match="the batch file has changed"):
        folder_to_resume(other, tmp_path)


def test_a_run_of_an_earlier_release_whose_jobs_lack_later_fields_is_resumed(tmp_path):
    folder = run(tmp_path, status="interrupted")
    with closing(Journal.of_file(folder / "journal.db")) as journal:
        stored = journal.get("batch")
        del stored["jobs"][0]["evaluation"]["at_steps"]
        journal.put("batch", stored)
    assert folder_to_resume(BATCH, tmp_path) == folder


def test_a_run_of_a_later_release_is_of_another_batch(tmp_path):
    folder = run(tmp_path, status="interrupted")
    with closing(Journal.of_file(folder / "journal.db")) as journal:
        journal.put("batch", journal.get("batch") | {"later": True})
    with pytest.raises(InputError, match="the batch file has changed"):
        folder_to_resume(BATCH, tmp_path)


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    """Carries out a command of a dry run, whose plan is empty, and returns its exit code."""
    from ringmaster.flows import cli, settings

    monkeypatch.setattr(settings, "prepare_environment", lambda _: None)
    for variable in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "RINGMASTER_DATABASE", "RINGMASTER_CHECKPOINTS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path / "home"))
    empty = dry_runs.DryRun(
        batch="nightly", made_s=0.0, num_trials=0, price_per_device_hour=1.0, folder=tmp_path, faults={}
    )
    no_context = SimpleNamespace(with_models=lambda _: None)
    monkeypatch.setattr(dry_runs, "open_node_context", lambda *_, **__: nullcontext(no_context))
    monkeypatch.setattr(dry_runs, "_here", lambda *_, **__: empty)
    monkeypatch.setattr("ringmaster.tasks.batch.load_batch", lambda *_, **__: BATCH)
    (tmp_path / "nightly.yaml").write_text("name: nightly\n")

    def invoke(*arguments):
        return CliRunner().invoke(cli.app, ["run", str(tmp_path / "nightly.yaml"), "--dry-run", *arguments])

    return invoke


def test_a_dry_run_refuses_to_resume_what_a_run_would_not_resume(dry_run, tmp_path):
    assert dry_run("--resume").exit_code == 0, "nothing has begun: a run would start it"
    run(tmp_path / "home", status="done")
    assert "is done. To fix: leave out --resume" in str(dry_run("--resume").exception)
    assert dry_run().exit_code == 0


def test_a_dry_run_refuses_a_root_of_checkpoints_that_a_run_could_not_write(dry_run, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RINGMASTER_CHECKPOINTS", str(tmp_path / "file"))
    assert "RINGMASTER_CHECKPOINTS" in str(dry_run().exception)


def test_one_whose_prices_were_renewed_goes_on_with_these(tmp_path):
    old, now = (replace(BATCH, planning={"tariffs": {"every": {"power_w": power_w}}}) for power_w in (1.0, 2.0))
    folder = run(tmp_path, status="interrupted", batch=old)
    assert folder_to_resume(now, tmp_path) == folder
    resumed = resumed_batch(folder, now)
    assert resumed.planning["tariffs"]["every"]["power_w"] == 2.0 and resumed.planning["tariffs"]["former"]
    assert resumed_batch(folder, old).planning["tariffs"]["every"]["power_w"] == 1.0


def test_a_dry_run_that_resumes_plans_with_the_prices_that_the_run_would_have(dry_run, tmp_path, monkeypatch):
    old, now = (replace(BATCH, planning={"tariffs": {"every": {"power_w": power_w}}}) for power_w in (1.0, 2.0))
    run(tmp_path / "home", status="interrupted", batch=old)
    monkeypatch.setattr("ringmaster.tasks.batch.load_batch", lambda *_, **__: now)
    made, empty = [], dry_runs._here()
    monkeypatch.setattr(dry_runs, "_here", lambda *_, left, **__: made.append(left) or empty)
    assert dry_run("--resume").exit_code == 0
    assert made[0].batch.planning["tariffs"]["every"]["power_w"] == 2.0
