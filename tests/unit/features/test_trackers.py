"""Trackers beside MLflow: what they get is what MLflow has, and no tracker that fails or is slow holds anything up."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from ringmaster import extras
from ringmaster.errors import BatchFileError
from ringmaster.features.trackers import pages
from ringmaster.features.trackers.job import TRACKERS
from ringmaster.features.trackers.pages import TrackerListener
from ringmaster.features.trackers.tracker import Tracker, plain_params
from ringmaster.flows.sweep_form import load_sweep, spec_of
from ringmaster.model_lineage.records import MetricPoint
from ringmaster.tasks.batch import Batch, parse_batch
from ringmaster.tasks.pool.event_log import BatchEvents
from ringmaster.tasks.recording.async_recorder import AsyncRecorder, PoolRecorder
from ringmaster.tasks.recording.record_hooks import RecordedRun
from ringmaster.tasks.retraining.production import load_production
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import JobStatus, Journal
from tests.unit.recording.ledgers import FakeLedger
from tests.unit.recording.test_async_recorder import BATCH, KEY, check, finish, planned, recorded, story, tell

JOB = "{name: a, model: {architecture: LlamaForCausalLM}, data: {source: python-stdlib, seq_len: 8}, num_steps: 1}"
RUN = RecordedRun(batch="night", job="a", run_id="0123456789ab", params={"optimizer": {"lr": 0.1}}, tags={})
WAIT_S = 60.0


class FakeTracker(Tracker):
    """Keeps what it gets, waits while `is_open` is not set, and fails in the methods that `fails_in` names."""

    def __init__(self, folder, *, fails_in=()):
        super().__init__(folder)
        self.calls, self.fails_in = [], fails_in
        self.is_open, self.is_waiting = threading.Event(), threading.Event()
        self.is_open.set()

    def _note(self, method, *what):
        self.is_waiting.set()
        assert self.is_open.wait(WAIT_S)
        self.calls.append((method, *what))
        if method in self.fails_in:
            raise OSError(28, "No space left on device")

    def open_run(self, job):
        self._note("open_run", job)

    def add(self, job, scalars):
        self._note("add", job, [*scalars])

    def end_run(self, job, metrics, *, step, status):
        self._note("end_run", job, dict(metrics), step, status)

    def close(self):
        self._note("close")


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


@pytest.fixture
def installed(monkeypatch):
    """All trackers count as installed."""
    for name in TRACKERS:
        monkeypatch.setitem(extras.PACKAGES, name, ())


def use(monkeypatch, tracker):
    monkeypatch.setattr(pages, "tracker_of", lambda name: tracker)


def tracked(*names):
    return replace(BATCH, text=json.dumps({"name": "nightly", "trackers": names}))


def record(database, *events, batch, ledger=None, notices=None):
    """Records events of a batch; returns the ledger."""
    ledger = ledger or FakeLedger()
    notices = [] if notices is None else notices
    recorder = AsyncRecorder(ledger, Journal(database, batch=KEY), batch=batch, notice=notices.append)
    recorder.begin(recorded(), devices=["d"], num_trials=0)
    for event in events:
        recorder.listen(event)
    finish(recorder)
    assert recorder.close() == []
    assert recorder.is_complete
    return ledger


HEX = "0123456789abcdef0123456789abcdef"


class HexLedger(FakeLedger):
    """A ledger whose run of a job has an id as MLflow makes them."""

    def start_job(self, batch_run, name, *, params, tags):
        return self.runs.setdefault((batch_run, name), HEX)


def in_ledger(ledger):
    """By key and step: the values that MLflow has of job a."""
    return {(point.key, point.step): point.value for run, point in ledger.points if run in ("run of a", HEX)}


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_is_refused_with_what_installs_it(name, monkeypatch, tmp_path):
    monkeypatch.setitem(extras.PACKAGES, name, ("no_such_package",))
    with pytest.raises(BatchFileError) as refused:
        parse_batch(f"trackers: [{name}]\njobs: [{JOB}]", folder=tmp_path, name="b.yaml")
    (fault,) = map(str, refused.value.faults)
    assert fault == (
        f"b.yaml:1: trackers[0]: {name} needs no_such_package, not installed. "
        f"To fix: pip install 'ringmaster-ml[{name}]'."
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [("[tensorbord]", "did you mean `tensorboard`"), ("tensorboard", "must be a list"), ("[wandb, wandb]", "wandb")],
)
def test_trackers_that_there_are_not_are_refused(value, message, tmp_path, installed):
    with pytest.raises(BatchFileError, match=message):
        parse_batch(f"trackers: {value}\njobs: [{JOB}]", folder=tmp_path, name="b.yaml")


def test_a_batch_of_python_and_its_json_form_keep_their_trackers(installed):
    job = parse_batch(f"jobs: [{JOB}]", folder=BATCH.folder or pages.tracker_folder().parent, name="b").jobs[0]
    batch = Batch.of(name="b", jobs=[job], trackers=["wandb"])
    for each in (batch, Batch.from_json(batch.to_json())):
        (listener,) = pages.TrackerReport().listeners(each, notice=print)
        listener.close()


def test_a_sweep_hands_its_trackers_to_the_batch_of_its_trials(tmp_path, installed):
    file = tmp_path / "sweep.yaml"
    job = JOB.replace("name: a, ", "")
    file.write_text(f"template: {{job: {job}}}\nspace: {{seed: [0]}}\ntrackers: [trackio]\nnum_trials: 1\n")
    form = load_sweep(file)
    assert form.parameters()["batch_keys"] == {"trackers": ["trackio"]}
    assert json.loads(spec_of(form).batch().text)["trackers"] == ["trackio"]
    file.write_text(file.read_text().replace("trackio", "trackoi"))
    with pytest.raises(BatchFileError, match=r"sweep.yaml:3: trackers\[0\]: 'trackoi' is unknown"):
        load_sweep(file)


# -- records ----------------------------------------------------------------------------------------------------------


def retraining_file(folder, keys):
    model = "{architecture: LlamaForCausalLM, config: {hidden_size: 8}}"
    data = "{source: python-stdlib, seq_len: 8}"
    file = folder / "models.yaml"
    file.write_text(f"name: shop\n{keys}\nmodels: [{{name: a, job: {{model: {model}, num_steps: 1}}, data: {data}}}]\n")
    return file


def test_a_retraining_file_hands_its_trackers_to_the_batch_of_a_run(tmp_path, installed):
    production = load_production(retraining_file(tmp_path, "trackers: [trackio]"))
    assert production.batch_keys == {"trackers": ["trackio"]}
    assert load_production(retraining_file(tmp_path, "devices: auto")).batch_keys == {}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("trackers: [trackoi]", "models.yaml:2: trackers[0]: 'trackoi' is unknown"),
        ("shared_components: {}", "models.yaml:2: shared_components: is an unknown key"),
    ],
)
def test_keys_that_no_retraining_file_has_are_refused(tmp_path, installed, keys, message):
    with pytest.raises(BatchFileError) as raised:
        load_production(retraining_file(tmp_path, keys))
    assert message in str(raised.value)


def test_a_tracker_of_a_retraining_file_that_is_not_installed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(extras.PACKAGES, "trackio", ("no_such_package",))
    with pytest.raises(BatchFileError, match=r"models.yaml:2: trackers\[0\]: trackio needs no_such_package"):
        load_production(retraining_file(tmp_path, "trackers: [trackio]"))


def test_a_batch_without_trackers_has_no_listener():
    assert [*pages.TrackerReport().listeners(BATCH, notice=print)] == []


def test_a_tracker_gets_what_mlflow_has(database, monkeypatch, tmp_path):
    tracker = FakeTracker(tmp_path)
    use(monkeypatch, tracker)
    ledger = record(database, planned(), *story(), batch=tracked("wandb"))
    check(ledger)
    opened, *added, ended, closed = tracker.calls
    job = opened[1]
    assert (job.batch, job.job, job.run_id) == ("nightly", "a", "run of a")
    assert job.params["optimizer.lr"] == BATCH.jobs[0].optimizer.lr
    assert job.tags == {"ringmaster.job": "a", "mlflow.run_id": "run of a", "mlflow.parent_run_id": "run of nightly"}
    assert {(each.key, each.step): each.value for _, _, scalars in added for each in scalars} == in_ledger(ledger)
    assert ended == ("end_run", "a", {"loss": 0.5}, 2, "done")
    assert closed == ("close",)


def test_a_tracker_of_a_pools_batch_gets_the_same(database, monkeypatch, tmp_path):
    tracker, ledger = FakeTracker(tmp_path), FakeLedger()
    use(monkeypatch, tracker)
    journal = Journal(database, batch=KEY)
    tell(database, planned(), *story())
    recorder = PoolRecorder(
        ledger, journal, batch=tracked("wandb"), events=BatchEvents(database, KEY), notice=lambda _: None
    )
    recorder.begin(recorded(), devices=["d"], num_trials=0)
    finish(recorder)
    assert recorder.close() == []
    scalars = [each for call in tracker.calls if call[0] == "add" for each in call[2]]
    assert {(each.key, each.step): each.value for each in scalars} == in_ledger(ledger)
    assert [method for method, *_ in tracker.calls][-2:] == ["end_run", "close"]


def test_a_job_that_failed_ends_its_run(database, monkeypatch, tmp_path):
    tracker = FakeTracker(tmp_path)
    use(monkeypatch, tracker)
    record(database, *story(status=JobStatus.FAILED), batch=tracked("wandb"))
    assert tracker.calls[-2] == ("end_run", "a", {}, 0, "failed")


def test_a_resumed_batch_opens_the_run_again(database, monkeypatch, tmp_path):
    first, second, ledger = FakeTracker(tmp_path), FakeTracker(tmp_path), FakeLedger()
    *events, ended = story()
    use(monkeypatch, first)
    record(database, *events, batch=tracked("wandb"), ledger=ledger)
    use(monkeypatch, second)
    record(database, ended, batch=tracked("wandb"), ledger=ledger)
    assert [method for method, *_ in first.calls] == ["open_run", "add", "close"]
    assert [method for method, *_ in second.calls] == ["open_run", "end_run", "close"]
    assert first.calls[0][1] == second.calls[0][1]


def test_points_without_a_value_are_left_out_as_in_mlflow(tmp_path):
    tracker = FakeTracker(tmp_path)
    listener = TrackerListener(tracker, name="wandb", notice=print)
    listener.open_run(RUN)
    listener.add_points("a", [MetricPoint("x", float("nan"), 1, 5000), MetricPoint("y", 2.0, 1, 5000)])
    listener.close()
    assert tracker.calls[1] == ("add", "a", [("y", 2.0, 1, 5.0)])


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["open_run", "add", "end_run", "close"])
def test_a_tracker_that_fails_is_reported_once_and_stops_nothing(database, monkeypatch, tmp_path, method):
    tracker, notices = FakeTracker(tmp_path, fails_in=(method,)), []
    use(monkeypatch, tracker)
    ledger = record(database, planned(), *story(), *story("b"), batch=tracked("wandb"), notices=notices)
    assert ledger.statuses == dict.fromkeys(("run of a", "run of b", "run of nightly"), "FINISHED")
    assert ("train/loss", 2) in in_ledger(ledger)
    (notice,) = notices
    assert notice == (
        "wandb gets no more records of this run, MLflow has them: OSError: [Errno 28] No space left on device"
    )
    assert [each for each, *_ in tracker.calls].count(method) == 1
    assert tracker.calls[-1][0] == method


def test_what_a_tracker_says_of_its_fault_is_one_short_line(tmp_path):
    class Verbose(FakeTracker):
        def open_run(self, job):
            raise RuntimeError("no key:\n  log in\n" + "x" * 9000)

    notices = []
    listener = TrackerListener(Verbose(tmp_path), name="wandb", notice=notices.append)
    listener.open_run(RUN)
    listener.close()
    (notice,) = notices
    assert "RuntimeError: no key: log in x" in notice and len(notice) < 400


def test_a_tracker_that_fails_takes_nothing_from_another(database, monkeypatch, tmp_path):
    trackers = {"wandb": FakeTracker(tmp_path, fails_in=("open_run",)), "trackio": FakeTracker(tmp_path)}
    monkeypatch.setattr(pages, "tracker_of", trackers.get)
    record(database, *story(), batch=tracked("wandb", "trackio"))
    assert [method for method, *_ in trackers["trackio"].calls] == ["open_run", "add", "end_run", "close"]


def test_a_slow_tracker_delays_nobody_and_loses_only_points(tmp_path):
    tracker, notices = FakeTracker(tmp_path), []
    tracker.is_open.clear()
    listener = TrackerListener(tracker, name="wandb", notice=notices.append, max_waiting=3)
    listener.open_run(RUN)
    assert tracker.is_waiting.wait(WAIT_S)  # from here on nothing is taken from the queue
    for step in range(10):
        listener.add_points("a", [MetricPoint("x", 1.0, step, 0)])
    *_, ended = story()
    listener.end_run(ended.record)
    tracker.is_open.set()
    listener.close()
    assert [method for method, *_ in tracker.calls] == ["open_run", "add", "add", "add", "end_run", "close"]
    assert notices == ["wandb was too slow for 7 groups of points; MLflow has them"]


def test_the_end_of_a_batch_does_not_wait_for_a_tracker_for_long(tmp_path):
    tracker, notices = FakeTracker(tmp_path), []
    tracker.is_open.clear()
    listener = TrackerListener(tracker, name="wandb", notice=notices.append)
    listener.open_run(RUN)
    listener.close(timeout_s=0.01)
    assert notices == ["wandb has not taken all records within 0.01 s; MLflow has them"]
    tracker.is_open.set()


def test_params_are_numbers_and_texts():
    params = {"a": {"b": 1, "c": None, "d": {"e": True}}, "f": (1, 2), "g": "x"}
    assert plain_params(params) == {"a.b": 1, "a.d.e": True, "f": "(1, 2)", "g": "x"}


# -- each tracker, read back -------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    return tmp_path


def test_event_files_of_tensorboard_have_what_mlflow_has(database, home):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    notices = []
    batch = tracked("tensorboard")
    ledger = record(database, planned(), *story(), batch=batch, ledger=HexLedger(), notices=notices)
    assert notices == []
    (folder,) = (home / "trackers" / "tensorboard" / "nightly").iterdir()
    assert folder.name == "a-01234567"
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    values = {(key, each.step): each.value for key in read.Tags()["scalars"] for each in read.Scalars(key)}
    times = {(key, each.step): each.wall_time for key in read.Tags()["scalars"] for each in read.Scalars(key)}
    assert values.pop(("final/loss", 2)) == 0.5
    assert values == {place: float(np.float32(value)) for place, value in in_ledger(ledger).items()}
    assert times["train/loss", 1] == 5.0
    tags = json.loads(read.Tensors("ringmaster/tags")[0].tensor_proto.string_val[0])
    assert tags["mlflow.run_id"] == HEX


def test_the_hyperparameters_of_tensorboard_are_the_jobs(database, home):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    record(database, *story(), batch=tracked("tensorboard"))
    (file,) = (home / "trackers").rglob("events.out.tfevents.*")
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "hparams":
                content = HParamsPluginData.FromString(value.metadata.plugin_data.content)
                hparams = content.session_start_info.hparams
                assert hparams["optimizer.lr"].number_value == BATCH.jobs[0].optimizer.lr
                assert hparams["mlflow.run_id"].string_value == "run of a"
                return
    pytest.fail("there are no hyperparameters")


def test_a_disk_that_is_full_is_reported_by_tensorboards_tracker(database, home):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    (home / "trackers").mkdir()
    (home / "trackers" / "tensorboard").write_text("a file where a folder has to be")
    notices = []
    check(record(database, planned(), *story(), batch=tracked("tensorboard"), notices=notices))
    (notice,) = notices
    assert "tensorboard gets no more records of this run, MLflow has them: NotADirectoryError" in notice


def chunks(content):
    """The records of a file in the format of LevelDB's logs: blocks of 32 KiB of pieces, after a header of 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole record, or its last piece
            yield record
            record = b""


def test_offline_runs_of_wandb_have_what_mlflow_has(database, home):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    notices = []
    batch = tracked("wandb")
    ledger = record(database, planned(), *story(), batch=batch, ledger=HexLedger(), notices=notices)
    assert notices == []
    (file,) = (home / "trackers" / "wandb").rglob("*.wandb")
    values, config, summary = {}, {}, {}
    for content in map(Record.FromString, chunks(file.read_bytes())):
        items = {tuple(item.nested_key) or (item.key,): json.loads(item.value_json) for item in content.history.item}
        step = items.get(("step",))
        values |= {
            (key, step): value for (key, *_), value in items.items() if not key.startswith("_") and key != "step"
        }
        config |= {item.key: json.loads(item.value_json) for item in content.run.config.update}
        summary |= {item.key: json.loads(item.value_json) for item in content.summary.update}
    assert values == in_ledger(ledger)
    assert config["optimizer.lr"] == BATCH.jobs[0].optimizer.lr
    assert config["mlflow"]["mlflow.run_id"] == HEX
    assert summary["final/loss"] == 0.5


def test_the_projects_of_trackio_have_what_mlflow_has(database, home):
    if find_spec("trackio") is None:  # which reads its folder from the environment when it is imported
        pytest.skip("the extra trackio is not installed")
    notices = []
    batch = tracked("trackio")
    ledger = record(database, planned(), *story(), batch=batch, ledger=HexLedger(), notices=notices)
    assert notices == []
    program = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
project, run = sys.argv[1:]
print(json.dumps({"logs": SQLiteStorage.get_logs(project, run), "config": SQLiteStorage.get_run_config(project, run)}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "ringmaster-nightly", "a-01234567"],
        env={**os.environ, "TRACKIO_DIR": str(home / "trackers" / "trackio")},
        capture_output=True,
        text=True,
        check=True,
    )
    read = json.loads(done.stdout.splitlines()[-1])
    values = {
        (key, row["step"]): value
        for row in read["logs"]
        for key, value in row.items()
        if key not in ("step", "timestamp")
    }
    assert values.pop(("final/loss", 2)) == 0.5
    assert values == in_ledger(ledger)
    assert read["config"]["optimizer.lr"] == BATCH.jobs[0].optimizer.lr
    assert read["config"]["mlflow.run_id"] == HEX
