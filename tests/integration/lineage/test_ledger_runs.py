"""The ledger's runs and profiles, in a real SQLite store."""

import io
import json
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import pandas
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from ringmaster.errors import LedgerError
from ringmaster.model_lineage import QUIET_ENVIRONMENT, DatasetInput, Ledger, MetricPoint, model_pages
from ringmaster.model_lineage.ledger.connection import EXPERIMENT_TAGS
from ringmaster.model_lineage.ledger.runs import PARAM_LIMIT, TAG_LIMIT, valid_key

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"/>'


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET_ENVIRONMENT.items():
            patch.setenv(name, value)
        yield Ledger(f"sqlite:///{tmp_path_factory.mktemp('ledger')}/mlflow.db", experiment="tests")


@pytest.fixture
def run(ledger):
    return ledger.start_batch("a batch", params={})


def run_of(ledger, run_id):
    return ledger.client.get_run(run_id)


def history(ledger, run_id, key):
    return [(point.step, point.value) for point in ledger.client.get_metric_history(run_id, key)]


def settings_of_mlflow():
    """The MLflow settings in the environment; those that MLflow sets for its own use start with an underscore."""
    return {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_")}


@pytest.mark.usefixtures("databases_made_anew")
def test_a_fresh_store_is_opened_silently_and_leaves_the_process_as_it_was(tmp_path, capfd):
    import mlflow

    before = (settings_of_mlflow(), mlflow.get_tracking_uri(), mlflow.get_registry_uri())
    fresh = Ledger(f"sqlite:///{tmp_path}/new folder/mlflow.db")
    assert fresh.find_profiles(["x"]) == {}
    fresh.start_batch("b", params={"x": 1}, files={"batch.yaml": "name: b\n"})
    assert capfd.readouterr() == ("", "")
    assert (settings_of_mlflow(), mlflow.get_tracking_uri(), mlflow.get_registry_uri()) == before
    assert mlflow.active_run() is None
    assert sorted(path.name for path in (tmp_path / "new folder").iterdir()) == ["artifacts", "mlflow.db"]


@pytest.mark.usefixtures("databases_made_anew")
def test_several_may_open_a_fresh_store_at_once(tmp_path):
    ledgers = [Ledger(f"sqlite:///{tmp_path}/mlflow.db", experiment="tests") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        runs = set(pool.map(lambda one: one.start_batch("b", params={}), ledgers))
    assert len(runs) == 4
    assert len({one.experiment_id("tests") for one in ledgers}) == 1


@pytest.mark.usefixtures("databases_made_anew")
def test_a_store_whose_making_was_interrupted_is_made_anew(tmp_path, monkeypatch):
    def killed(_):
        raise KeyboardInterrupt

    fresh = Ledger(f"sqlite:///{tmp_path}/mlflow.db")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("ringmaster.files.os.fsync", killed)
        fresh.warm_up()
    assert fresh.find_profiles(["x"]) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_a_batch_keeps_its_parameters_and_files(ledger):
    batch = ledger.start_batch("tonight", params={"objective": "makespan"}, files={"in/batch.yaml": "name: tonight\n"})
    recorded = run_of(ledger, batch)
    assert recorded.info.run_name == "tonight"
    assert recorded.info.status == "RUNNING"
    assert recorded.data.params == {"objective": "makespan"}
    assert ledger.read_text(batch, "in/batch.yaml") == "name: tonight\n"


def test_a_job_is_a_child_of_its_batch_and_starting_it_again_goes_on(ledger, run):
    job = ledger.start_job(run, "llama", params={"optimizer": {"lr": 3e-4}}, tags={"node": "a"})
    recorded = run_of(ledger, job).data
    assert recorded.params == {"optimizer.lr": "0.0003"}
    assert recorded.tags["mlflow.parentRunId"] == run
    assert recorded.tags["node"] == "a"

    ledger.finish_run(job, "FAILED")
    assert ledger.start_job(run, "llama", params={"optimizer": {"lr": 3e-4}}) == job
    assert run_of(ledger, job).info.status == "RUNNING"
    assert ledger.start_job(run, "gpt2", params={}) != job
    with pytest.raises(LedgerError, match="letters, digits"):
        ledger.start_job(run, "it's", params={})


def test_a_run_ends_and_is_resumed(ledger, run):
    ledger.finish_run(run, "KILLED")
    assert run_of(ledger, run).info.status == "KILLED"
    assert run_of(ledger, run).info.end_time is not None
    ledger.resume_run(run)
    assert run_of(ledger, run).info.status == "RUNNING"
    with pytest.raises(LedgerError, match="FINISHED, FAILED, KILLED"):
        ledger.finish_run(run, "done")


def test_metrics_over_one_request_all_arrive_and_again_change_nothing(ledger, run):
    points = [MetricPoint("loss", 1 / (step + 1), step, 1000 + step) for step in range(2345)]
    ledger.log_metrics(run, points)
    ledger.log_metrics(run, points)
    assert history(ledger, run, "loss") == [(point.step, point.value) for point in points]


def test_values_that_are_no_number_are_told_by_a_tag(ledger, run):
    nan, infinite = float("nan"), float("inf")
    ledger.log_metrics(run, [MetricPoint("loss", value, step) for step, value in enumerate([2.0, nan, nan, 1.0])])
    ledger.log_metrics(run, [MetricPoint("loss", infinite, 9), MetricPoint("norm", infinite, 9)])
    assert history(ledger, run, "loss") == [(0, 2.0), (3, 1.0)]
    tags = run_of(ledger, run).data.tags
    assert tags["ringmaster.non_finite.loss"] == "nan at step 1"
    assert tags["ringmaster.non_finite.norm"] == "inf at step 9"


def test_a_long_parameter_is_shortened_and_kept_whole(ledger, run):
    value = list(range(PARAM_LIMIT))
    ledger.log_params(run, {"data": {"indices": value}})
    shown = run_of(ledger, run).data.params["data.indices"]
    assert len(shown) == PARAM_LIMIT
    assert shown.endswith("(whole in parameters/data.indices.json)")
    assert json.loads(ledger.read_text(run, "parameters/data.indices.json")) == value


def test_a_long_note_is_shortened_and_kept_whole(ledger, run):
    note = "".join(f"- line {index}\n" for index in range(TAG_LIMIT // 5))
    ledger.set_note(run, note)
    assert len(run_of(ledger, run).data.tags["mlflow.note.content"]) == TAG_LIMIT
    assert ledger.read_text(run, "tags/mlflow.note.content.txt") == note


def test_a_parameter_that_changed_is_refused(ledger, run):
    ledger.log_params(run, {"lr": 1})
    ledger.log_params(run, {"lr": 1})
    with pytest.raises(LedgerError, match="lr"):
        ledger.log_params(run, {"lr": 2})


def test_a_table_is_one_that_mlflow_reads_and_lists(ledger, run):
    rows = [{"job": "a", "devices": (0, 1)}, {"job": "b", "seconds": float("nan")}]
    ledger.write_table(run, "plan/segments.json", rows)
    ledger.write_table(run, "plan/segments.json", rows)
    ledger.write_table(run, "plan/jobs.json", [])
    text = ledger.read_text(run, "plan/segments.json")
    frame = pandas.read_json(io.StringIO(text), orient="split")  # as MLflow's load_table reads it
    assert list(frame.columns) == ["job", "devices", "seconds"]
    assert frame["job"].tolist() == ["a", "b"]
    assert frame["devices"].tolist() == [[0, 1], None]
    assert [entry["path"] for entry in json.loads(run_of(ledger, run).data.tags["mlflow.loggedArtifacts"])] == [
        "plan/segments.json",
        "plan/jobs.json",
    ]


def test_pictures_and_json_are_kept(ledger, run):
    ledger.write_svg(run, "plan/gantt.svg", SVG)
    ledger.write_json(run, "plan.json", {"gap": float("inf"), "segments": [1]})
    assert ledger.read_text(run, "plan/gantt.svg") == SVG
    assert json.loads(ledger.read_text(run, "plan.json")) == {"gap": None, "segments": [1]}
    assert (
        model_pages.picture("Plan", run, "plan/gantt.svg")
        == f"![Plan](get-artifact?path=plan/gantt.svg&run_uuid={run})"
    )
    with pytest.raises(LedgerError, match=r"\.svg"):
        ledger.write_svg(run, "gantt.html", SVG)
    with pytest.raises(LedgerError, match=r"\.json"):
        ledger.write_table(run, "table.csv", [])


@pytest.mark.parametrize("path", ["../up.txt", "/etc/passwd", ""])
def test_an_artifact_stays_inside_its_run(ledger, run, path):
    with pytest.raises(LedgerError, match="not an artifact path"):
        ledger.write_text(run, path, "text")


def test_threads_do_not_lose_each_others_records(ledger, run):
    def record(number):
        job = ledger.start_job(run, f"job-{number}", params={"number": number})
        ledger.write_table(run, f"tables/{number}.json", [{"number": number}])
        ledger.log_metrics(job, [MetricPoint("loss", step, step) for step in range(50)])
        return job

    with ThreadPoolExecutor(6) as pool:
        jobs = list(pool.map(record, range(6)))
    assert len(set(jobs)) == 6
    assert all(len(history(ledger, job, "loss")) == 50 for job in jobs)
    assert len(json.loads(run_of(ledger, run).data.tags["mlflow.loggedArtifacts"])) == 6


def test_an_unknown_run_is_an_error_of_the_ledger(ledger):
    with pytest.raises(LedgerError, match="not found") as caught:
        ledger.log_params("0" * 32, {"a": 1})
    assert caught.value.code == "RESOURCE_DOES_NOT_EXIST"


def test_a_deleted_experiment_is_told_with_the_remedy(ledger):
    deleted = Ledger(ledger.tracking_uri, experiment="deleted")
    ledger.client.delete_experiment(deleted.experiment_id("deleted"))
    with pytest.raises(LedgerError, match="mlflow experiments restore"):
        Ledger(ledger.tracking_uri, experiment="deleted").start_batch("b", params={})


def test_a_database_of_another_version_is_told_with_the_remedy(tmp_path, ledger):
    with sqlite3.connect(ledger.tracking_uri.removeprefix("sqlite:///")) as source:
        source.execute("VACUUM INTO ?", [f"{tmp_path}/old.db"])
    with sqlite3.connect(f"{tmp_path}/old.db") as old:
        old.execute("UPDATE alembic_version SET version_num = '451aebb31d03'")
    with pytest.raises(LedgerError, match="mlflow db upgrade"):
        Ledger(f"sqlite:///{tmp_path}/old.db").warm_up()


def test_links_lead_to_the_run(ledger, run):
    experiment_id = run_of(ledger, run).info.experiment_id
    assert ledger.ui_links(run_id=run) == {
        "experiment": model_pages.experiment_path(experiment_id),
        "run": model_pages.run_path(experiment_id, run),
    }


def test_all_of_a_batch_is_in_one_experiment_and_is_found_there(ledger):
    batch = ledger.start_batch("first", batch="retraining", params={}, key="one")
    job = ledger.start_job(batch, "a job", params={})
    again = ledger.start_batch("second", batch="retraining", params={})
    experiment = ledger.client.get_experiment_by_name("tests/retraining")
    assert {ledger.experiment_of(id) for id in (batch, job, again)} == {experiment.experiment_id}
    assert ledger.batch_run("one") == batch
    assert ledger.ui_links(run_id=job)["experiment"] == model_pages.experiment_path(experiment.experiment_id)
    Ledger(ledger.tracking_uri, experiment="tests-other").warm_up()
    assert ledger.experiment_ids() == [experiment.experiment_id, ledger.experiment_id("tests")]


def test_profiles_are_found_exactly_and_the_newest_wins(ledger, monkeypatch):
    monkeypatch.setattr("ringmaster.model_lineage.ledger.runs.PROFILES_PER_PAGE", 2)  # several pages
    profile = {"technique": "ddp", "config": {"micro_batch": 4, "recompute": True}, "step_s": 0.1 + 0.2, "bytes": 7}
    long = {"technique": "fsdp", "notes": "é" * TAG_LIMIT}
    ledger.record_profile("one", profile)
    ledger.record_profile("two", long)
    ledger.record_profile("three", {"step_s": 1.0})
    ledger.record_profile("one", newer := {**profile, "step_s": 0.25})
    assert ledger.find_profiles(["one", "two", "other"]) == {"one": newer, "two": long}
    assert ledger.find_profiles([]) == {}


def test_a_profile_can_be_compared_in_the_ui(ledger):
    recorded = run_of(ledger, ledger.record_profile("x", {"technique": "ddp", "config": {"n": 2}, "step_s": 0.5}))
    assert recorded.info.run_name == "ddp"
    assert recorded.info.status == "FINISHED"
    assert recorded.data.metrics == {"config.n": 2.0, "step_s": 0.5}
    assert recorded.data.params == {"technique": "ddp"}


def test_a_profile_with_values_that_mlflow_refuses_is_recorded_and_found(ledger):
    profile = {
        "technique": "t" * 300,
        "config": {"a\nb": "x" * (PARAM_LIMIT + 1), "": True, "../up": 2, "k" * 300: "\0\ud800"},
        "step_s": float("inf"),
        "bytes": 10**400,
        "knobs": {f"knob {number}": "on" for number in range(250)},
    }
    run_id = ledger.record_profile("odd", profile)
    recorded = run_of(ledger, run_id)
    assert recorded.info.status == "FINISHED"
    assert recorded.data.params[valid_key("config.a\nb")].endswith("(whole in parameters/config.a_b-becf3f68.json)")
    assert recorded.data.tags["ringmaster.non_finite.step_s"] == "inf at step 0"
    assert len([key for key in recorded.data.params if key.startswith("knobs.")]) == 250
    assert ledger.find_profiles(["odd"]) == {"odd": profile}


def test_the_metrics_of_the_newest_finished_runs_of_a_batch_are_found(ledger):
    assert ledger.finished_batches("unknown", most=5) == []
    for number, status in enumerate(["FINISHED", "FAILED", "FINISHED", "FINISHED"]):
        run_id = ledger.start_batch("often", batch="often", params={})
        ledger.log_metrics(run_id, [MetricPoint("makespan_s", float(number))])
        ledger.start_job(run_id, "a job", params={})
        ledger.finish_run(run_id, status)
    ledger.start_batch("often", batch="often", params={})  # it runs
    assert [found["makespan_s"] for found in ledger.finished_batches("often", most=2)] == [3.0, 2.0]
    assert len(ledger.finished_batches("often", most=20)) == 3


def test_files_of_a_server_are_found_where_its_database_is_opened_directly(ledger, tmp_path):
    """As after `ringmaster down`: a run of the same home adds to an experiment that the pool's server has created."""
    ledger.client.create_experiment("tests/served", artifact_location="mlflow-artifacts:/77")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    batch = ledger.start_batch("b", batch="served", params={}, files={"batch.yaml": "name: b\n"})
    job = ledger.start_job(batch, "j", params={})
    record = ledger.record_model("served.j", run_id=job, folder=tmp_path / "model", kind="pretrained")
    assert (ledger.file.parent / "artifacts" / "77" / batch / "artifacts" / "batch.yaml").read_text() == "name: b\n"
    assert ledger.read_text(batch, "batch.yaml") == "name: b\n"
    copy = ledger.download_model(record.uri, tmp_path / "copies")
    assert (copy / "model.safetensors").read_bytes() == b"weights"


ODD_NAMES = [
    "acc[/top5]",
    "a\nb",
    "../up",
    "/top",
    "a//b",
    "",
    ".",
    "\ud800",
    "nul\0",
    "x" * 300,
    "Genauigkeit-ä",
    "50%",
]


def test_no_name_or_value_is_refused(ledger, run):
    values = {name: f"{name} \0 \ud800" for name in ODD_NAMES}
    ledger.log_params(run, values)
    ledger.set_tags(run, values)
    ledger.log_metrics(run, [MetricPoint(name, 1.0) for name in ODD_NAMES])
    ledger.log_metrics(run, [MetricPoint(name, float("nan")) for name in ODD_NAMES])
    data = run_of(ledger, run).data
    assert len(data.params) == len(data.metrics) == len(ODD_NAMES)
    assert data.params["Genauigkeit-ä"] == "Genauigkeit-ä \\x00 \\ud800"
    assert {valid_key(name) for name in ODD_NAMES} == set(data.metrics)


def test_data_of_any_name_are_recorded(ledger, run, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    data = [DatasetInput(name=name, digest="d", source=name, context="\0") for name in ODD_NAMES]
    ledger.record_model("odd", run_id=run, folder=tmp_path, kind="pretrained", datasets=data)
    names = {entry.dataset.name for entry in run_of(ledger, run).inputs.dataset_inputs}
    assert names == {name.replace("\0", "\\x00").replace("\ud800", "\\ud800") for name in ODD_NAMES}


def test_params_of_an_attempt_that_was_cut_off_stay(ledger):
    run = ledger.start_batch("cut off", params={"num_trials": 3}, key="cut off")
    assert ledger.start_batch("cut off", params={"num_trials": 0, "devices": 2}, key="cut off") == run
    assert run_of(ledger, run).data.params == {"num_trials": "3", "devices": "2"}


def test_experiments_are_those_of_models_that_are_trained(ledger, run):
    experiment = ledger.client.get_experiment(ledger.experiment_of(run))
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


@pytest.mark.parametrize(
    "opened",
    [lambda ledger: ledger.start_batch("again", params={}, batch="old"), lambda ledger: ledger.warm_up(batch="old")],
    ids=["a run is started", "the ledger is warmed up"],
)
@pytest.mark.parametrize("chosen", [None, "genai_development"], ids=["no kind", "a kind that a user chose"])
def test_an_experiment_of_an_earlier_release_gets_the_kind_that_it_lacks(ledger, opened, chosen):
    (tag,) = EXPERIMENT_TAGS
    earlier = Ledger(ledger.tracking_uri, experiment=ledger.experiment)
    experiment = ledger.client.get_experiment(earlier.experiment_of(earlier.start_batch("old", params={}, batch="old")))
    ledger.client.set_experiment_tag(experiment.experiment_id, tag, chosen or "")
    if chosen is None:
        with sqlite3.connect(ledger.file) as connection:
            connection.execute("DELETE FROM experiment_tags WHERE key = ?", [tag])
    again = Ledger(ledger.tracking_uri, experiment=ledger.experiment)
    again.finished_batches("old", most=1)  # which only reads
    opened(again)
    tags = ledger.client.get_experiment(experiment.experiment_id).tags
    assert tags[tag] == (chosen or EXPERIMENT_TAGS[tag])


def test_an_experiment_whose_kind_cannot_be_set_gets_runs_all_the_same(ledger, run, monkeypatch):
    asked = []

    def refuse(_, experiment_id, key, value):
        asked.append((experiment_id, key, value))
        raise MlflowException("only managers may", error_code=PERMISSION_DENIED)

    (tag,) = EXPERIMENT_TAGS
    with sqlite3.connect(ledger.file) as connection:
        connection.execute("DELETE FROM experiment_tags WHERE key = ?", [tag])
    monkeypatch.setattr(MlflowClient, "set_experiment_tag", refuse)
    again = Ledger(ledger.tracking_uri, experiment=ledger.experiment)
    for _ in range(2):
        assert again.start_batch("refused", params={})
    assert asked == [(ledger.experiment_of(run), tag, EXPERIMENT_TAGS[tag])]


def test_runs_of_a_batch_that_were_deleted_are_restored(ledger, run):
    jobs = [ledger.start_job(run, name, params={}) for name in ("a", "b", "c")]
    other = ledger.start_batch("another batch", params={})
    for each in (run, *jobs[:2], other):
        ledger.client.delete_run(each)
    assert ledger.restore_runs(run) == 3
    assert ledger.restore_runs(run) == 0
    stages = {each: run_of(ledger, each).info.lifecycle_stage for each in (run, *jobs, other)}
    assert [name for name, stage in stages.items() if stage == "deleted"] == [other]
    ledger.resume_run(run)


def purge(ledger, folder, run_id):
    """Removes a run as `mlflow gc` does."""
    SqlAlchemyStore(ledger.tracking_uri, str(folder))._hard_delete_run(run_id)


def test_a_run_of_a_job_that_is_purged_while_others_are_restored_is_left_out(ledger, run, tmp_path, monkeypatch):
    jobs = [ledger.start_job(run, name, params={}) for name in ("a", "b")]
    for each in (run, *jobs):
        ledger.client.delete_run(each)
    search = MlflowClient.search_runs

    def search_and_purge(*arguments, **options):
        page = search(*arguments, **options)
        purge(ledger, tmp_path, jobs[0])
        return page

    monkeypatch.setattr(MlflowClient, "search_runs", search_and_purge)
    assert ledger.restore_runs(run) == 2
    assert [ledger.has_run(each) for each in (run, *jobs)] == [True, False, True]


def test_a_run_that_is_deleted_is_there_until_it_is_purged(ledger, run, tmp_path):
    ledger.client.delete_run(run)
    assert ledger.has_run(run)
    purge(ledger, tmp_path, run)
    assert not ledger.has_run(run)
    with pytest.raises(LedgerError) as caught:
        ledger.restore_runs(run)
    assert caught.value.code == "RESOURCE_DOES_NOT_EXIST"


def test_no_run_of_a_deleted_experiment_is_restored(ledger):
    run = ledger.start_batch("b", batch="deleted batch", params={})
    job = ledger.start_job(run, "a", params={})
    ledger.client.delete_experiment(ledger.experiment_of(run))
    with pytest.raises(LedgerError, match=r"tests/deleted batch.*mlflow experiments restore"):
        ledger.restore_runs(run)
    assert [run_of(ledger, each).info.lifecycle_stage for each in (run, job)] == ["deleted"] * 2
