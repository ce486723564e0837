"""A run on this machine whose process dies after any of its five stages continues and repeats nothing."""

import queue
from collections import Counter
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringmaster.flows import train_batch as steps
from ringmaster.flows.batch import local_run
from ringmaster.flows.batch import result as records
from ringmaster.flows.batch.local_run import LocalRun, open_local_run
from ringmaster.flows.batch.run_options import RunOptions
from ringmaster.flows.caller import Caller
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.execution.engine import EngineNode
from ringmaster.tasks.execution.forecast import ForecastConditions
from ringmaster.tasks.profiling.machine_load import MachineLoad
from ringmaster.tasks.profiling.stage import ProfilingResult
from ringmaster.techniques.preflight_result import Preflight
from ringmaster.techniques.processes.gang_events import JobResult, Outcome, OutcomeStatus
from tests.fake_engine import cpu_devices
from tests.unit.execution.fakes import LeasesInMemory, cluster, job, profile
from tests.unit.profiling.solos import FACTS
from tests.unit.recording.ledgers import FakeLedger

STEPS = ("profile", "make_plan", "execute", "evaluate", "_close_records")  # the last one before the end is reported
BATCH = Batch(name="nightly", jobs=(job("good"), job("bad")), folder=Path("/somewhere"), text="name: nightly\n")


class Killed(BaseException):
    """Stands for the sudden death of the process."""


class Leases(LeasesInMemory):
    """Leases that may be given back twice, as those on disk."""

    def give_back(self, devices):
        super().give_back([device for device in devices if device in self.held()])


class InstantEngine:
    """Trains each job in no time, but those in `failing`."""

    def __init__(self, trained, failing):
        self._trained, self._failing = trained, failing

    def nodes(self):
        return [EngineNode(name="here", devices=cpu_devices(1))]

    def start(self, call):
        name = call.order.job.name
        self._trained[name] += 1
        future = Future()
        result = JobResult(first_step=0, step=call.order.last_step, metrics={"loss": 1.0})
        failed = Outcome(status=OutcomeStatus.INVALID, message="its loss is NaN")
        future.set_result(failed if name in self._failing else Outcome(status=OutcomeStatus.DONE, result=result))
        return future

    def request(self, num_nodes):
        """Has all nodes."""

    def close(self):
        """Has nothing to close."""


class Processes:
    """Processes of one home, one after another. `flow_run` is the flow run in which each of them works."""

    def __init__(self, home, monkeypatch):
        self.home, self.flow_run, self.ledger = home, "run-1", FakeLedger()
        self.failing, self.trained, self.inspected = {"bad"}, Counter(), []
        monkeypatch.setenv("RINGMASTER_HOME", str(home))
        monkeypatch.setattr(local_run, "open_node_context", self._node)
        monkeypatch.setattr(local_run, "profile_jobs", self._profile)
        monkeypatch.setattr(local_run, "root_run", lambda: self.flow_run)
        monkeypatch.setattr(local_run, "current_flow_run", lambda: SimpleNamespace(id=self.flow_run))
        monkeypatch.setattr(local_run, "build_engine", lambda *_: InstantEngine(self.trained, self.failing))
        silent = SimpleNamespace(listen=lambda event: None, close=lambda: None)
        for name in ("DecisionArtifact", "GanttArtifact", "ProgressArtifact"):
            monkeypatch.setattr(local_run, name, lambda *_, **__: silent)
        for module, name in ((local_run, "show_plan"), (local_run, "log_decision"), (records, "log_decision")):
            monkeypatch.setattr(module, name, lambda *_, **__: None)
        for name in ("create_table_artifact", "show_cost", "emit_alarm"):
            monkeypatch.setattr(steps, name, lambda *_, **__: None)

    @contextmanager
    def _node(self, batch, *, caller, **_):
        node = SimpleNamespace(
            batch=batch,
            cluster=cluster(1),
            environment=SimpleNamespace(cache_dir=self.home, import_paths=(), weights={}),
            ledger=self.ledger,
            leases=Leases(),
            holder="batch nightly",
            caller=caller,
            load=MachineLoad,
            conditions=lambda load: ForecastConditions(),
            with_models=lambda journal: node,
            **dict.fromkeys(("profile_store", "lend", "server")),
        )
        yield node

    def _profile(self, jobs, **_):
        self.inspected.append([each.name for each in jobs])
        data = {"name": "d", "digest": "1", "source": "s", "num_samples": 1, "num_held_out": 0}
        preflights = {
            each.name: Preflight(
                job=each.name, data=data, facts=replace(FACTS, num_parameters=5), candidates=(), refusals=()
            )
            for each in jobs
        }
        profiles = {each.name: (profile(),) for each in jobs}
        return ProfilingResult(jobs=tuple(jobs), preflights=preflights, profiles=profiles, num_trials=len(jobs))

    def run(self, *, resume=False):
        """One process, from the first step to the last."""
        with open_local_run(BATCH, RunOptions(resume=resume), caller=Caller()) as run:
            profiles = steps.profile.fn(run)
            run.begin(profiles)
            plan = steps.make_plan.fn(run, profiles)
            result = steps.evaluate.fn(run, profiles, steps.execute.fn(run, plan))
            return steps.record.fn(run, result)

    def die_after(self, step, monkeypatch):
        """One process that dies after a step, and has recorded nothing of what waited to be recorded."""
        act = getattr(LocalRun, step)

        def act_and_die(run, *values):
            act(run, *values)
            run._recorder._todo = queue.Queue()
            raise Killed

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(LocalRun, step, act_and_die)
            patch.setattr(LocalRun, "_record_interrupted", lambda run, profiles: None)
            self.run()

    def folders(self):
        return [path for path in (self.home / "batches" / "nightly").iterdir() if path.is_dir()]


@pytest.fixture
def processes(tmp_path, monkeypatch):
    return Processes(tmp_path, monkeypatch)


@pytest.mark.parametrize("way", ["resume", "retry"])
@pytest.mark.parametrize("step", STEPS)
def test_what_was_done_before_the_process_died_is_not_repeated(processes, monkeypatch, step, way):
    processes.die_after(step, monkeypatch)
    if way == "resume":
        processes.flow_run = "run-2"
    result = processes.run(resume=way == "resume")
    assert processes.inspected == [["good", "bad"], ["good", "bad"] if step in STEPS[:2] else []]
    assert (processes.trained, len(processes.folders())) == ({"good": 1, "bad": 1}, 1)
    assert [row["status"] for row in result.jobs] == ["done", "failed"]
    assert result.makespan_s > 0 and result.plan["makespan_s"] > 0 and result.prediction is not None
    assert result.num_trials == 2
    assert [row["model_uri"] for row in result.jobs] == ["models:/nightly.good/1", None]
    statuses = {"run of nightly": "FAILED", "run of good": "FINISHED", "run of bad": "FAILED"}
    assert processes.ledger.statuses == statuses
    processes.failing = set()
    assert processes.run(resume=True).status == "done", "its end was reported, so the failed job is due again"
    assert processes.trained == {"good": 1, "bad": 2}


def test_a_flow_run_that_has_failed_goes_on_when_it_is_retried(processes):
    assert processes.run().status == "failed"
    processes.failing = set()
    assert processes.run().status == "done"
    assert (processes.trained, len(processes.folders())) == ({"good": 1, "bad": 2}, 1)
    assert processes.run().status == "done", "a flow run that died after all was recorded has nothing left to do"
    assert (processes.trained, len(processes.folders())) == ({"good": 1, "bad": 2}, 1)


def test_other_flow_runs_start_afresh(processes, monkeypatch):
    processes.failing = set()
    monkeypatch.setattr(local_run, "root_run", lambda: "a flow that trains it twice")
    for flow_run in ("run-1", "run-2"):
        processes.flow_run = flow_run
        assert processes.run().status == "done"
    assert (processes.trained, len(processes.folders())) == ({"good": 2, "bad": 2}, 2)
