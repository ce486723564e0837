import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from ringmaster.errors import EngineUnavailable
from ringmaster.tasks.execution.engine import NodeRun
from ringmaster.tasks.pool.provider import Allocation, AllocationStatus
from ringmaster.tasks.pool.work_pool import FIRST_DELAY_S, MachinesOfRuns, WorkPoolProvider


class FakeWorkPool:
    """Prefect and an engine in one: each run gets a machine when `serve` is called."""

    def __init__(self) -> None:
        self.runs: dict[str, NodeRun] = {}
        self.machines: dict[str, Allocation] = {}
        self.ends: dict[str, str] = {}
        self.numbers = itertools.count(1)
        self.is_prefect_away = self.is_engine_away = False

    def live(self) -> Sequence[NodeRun]:
        if self.is_prefect_away:
            raise ConnectionError("Prefect is away")
        return list(self.runs.values())

    def start(self) -> str:
        id = f"run-{next(self.numbers)}"
        self.runs[id] = NodeRun(id=id)
        return id

    def cancel(self, id: str) -> None:
        del self.runs[id]

    def why_ended(self, id: str) -> str:
        return self.ends.get(id, "")

    def poll(self, runs: Sequence[NodeRun]) -> Mapping[str, Allocation]:
        if self.is_engine_away:
            raise EngineUnavailable("the engine is away")
        return dict(self.machines)

    def allocation_of(self, run: NodeRun) -> str:
        return run.infrastructure

    def end(self, allocation: str) -> None:
        self.finish(allocation)

    def serve(self) -> None:
        for id, run in self.runs.items():
            self.runs[id] = replace(run, infrastructure=f"slurm:{id}", is_begun=True)
            self.machines.setdefault(
                f"slurm:{id}", Allocation(id=f"slurm:{id}", status=AllocationStatus.RUNNING, until_s=100.0)
            )

    def finish(self, allocation: str) -> None:
        self.runs.pop(allocation.removeprefix("slurm:"), None)
        self.machines[allocation] = replace(self.machines[allocation], status=AllocationStatus.ENDED, why="cancelled")


@pytest.fixture
def pool() -> FakeWorkPool:
    return FakeWorkPool()


@pytest.fixture
def now_s() -> list[float]:
    return [0.0]


@pytest.fixture
def provider(pool, now_s) -> WorkPoolProvider:
    return WorkPoolProvider(node_runs=pool, machines=pool, clock=lambda: now_s[0])


def test_as_many_runs_live_as_nodes_are_requested(pool, provider):
    provider.poll()
    assert not pool.runs, "nobody has asked yet"
    provider.request(2)
    provider.poll()
    provider.poll()
    assert len(pool.runs) == 2


def test_what_waits_is_cancelled_once_fewer_are_requested_and_what_serves_stays(pool, provider):
    provider.request(1)
    provider.poll()
    pool.serve()
    provider.request(3)
    provider.poll()
    assert len(pool.runs) == 3
    provider.request(0)
    provider.poll()
    assert [run.is_begun for run in pool.runs.values()] == [True]


def test_a_released_machine_ends_and_is_not_replaced_unless_it_is_asked_for(pool, provider):
    provider.request(2)
    provider.poll()
    pool.serve()
    provider.poll()
    first, second = sorted(provider.allocations())
    provider.request(1)
    provider.release(first)
    provider.poll()
    provider.release(first)
    provider.poll()
    statuses = {id: each.status for id, each in provider.allocations().items()}
    assert statuses == {first: AllocationStatus.ENDED, second: AllocationStatus.RUNNING}
    assert len(pool.runs) == 1


@pytest.mark.parametrize("status", [AllocationStatus.LEAVING, AllocationStatus.LOST])
def test_a_machine_that_leaves_or_is_lost_is_replaced(pool, provider, status):
    provider.request(1)
    provider.poll()
    pool.serve()
    (allocation,) = pool.machines
    pool.machines[allocation] = replace(pool.machines[allocation], status=status)
    provider.poll()
    assert len(pool.runs) == 2


def test_runs_that_end_before_they_begin_are_started_again_ever_later(pool, provider, now_s):
    provider.request(1)
    starts = []
    while now_s[0] < 10 * FIRST_DELAY_S:
        provider.poll()
        if pool.runs:
            starts.append(now_s[0])
            pool.runs.clear()  # its job was refused
        now_s[0] += 1.0
    waits = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert waits == sorted(waits) and waits[0] >= FIRST_DELAY_S and waits[1] >= 2 * FIRST_DELAY_S

    now_s[0] += 1000.0
    provider.poll()
    pool.serve()
    provider.served(pool.machines)
    provider.poll()
    pool.finish(next(iter(pool.machines)))
    provider.poll()
    assert len(pool.runs) == 1, "one whose node had come is replaced at once"


def test_runs_that_begin_and_end_before_their_node_comes_are_started_ever_later_and_say_why(
    pool, provider, now_s, caplog
):
    provider.request(1)
    starts = []
    while now_s[0] < 10 * FIRST_DELAY_S:
        provider.poll()
        if pool.runs:
            starts.append(now_s[0])
            pool.serve()
            provider.poll()
            (run,) = pool.runs
            pool.ends[run] = "Failed: --devices gpu:8: there are 0 GPUs"
            pool.finish(f"slurm:{run}")
        now_s[0] += 1.0
    waits = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert waits == sorted(waits) and waits[0] >= FIRST_DELAY_S and waits[1] >= 2 * FIRST_DELAY_S
    assert "run-1: Failed: --devices gpu:8: there are 0 GPUs; cancelled" in caplog.text


def test_the_end_of_a_run_is_asked_for_until_prefect_answers(pool, provider, caplog):
    def away(run):
        raise ConnectionError("Prefect is away")

    provider.request(1)
    provider.poll()
    pool.runs.clear()
    pool.why_ended = away
    with pytest.raises(ConnectionError):
        provider.poll()
    pool.why_ended = lambda id: "Crashed: no worker"
    provider.poll()
    assert caplog.text.count("Crashed: no worker") == 1


def test_the_engine_is_asked_while_prefect_is_away(pool, provider):
    provider.request(1)
    provider.poll()
    pool.serve()
    provider.poll()
    (allocation,) = pool.machines
    pool.finish(allocation)
    pool.is_prefect_away = True
    with pytest.raises(ConnectionError):
        provider.poll()
    assert provider.allocations()[allocation].status == AllocationStatus.ENDED


def test_nothing_changes_while_the_engine_is_away(pool, provider):
    provider.request(1)
    provider.poll()
    pool.serve()
    provider.poll()
    pool.is_engine_away = True
    with pytest.raises(EngineUnavailable):
        provider.poll()
    assert [each.status for each in provider.allocations().values()] == [AllocationStatus.RUNNING]
    assert len(pool.runs) == 1


def test_the_thread_asks_until_it_is_closed(pool):
    started, start = threading.Event(), pool.start
    pool.start = lambda: (start(), started.set())[0]
    provider = WorkPoolProvider(node_runs=pool, machines=pool, look_every_s=0.001)
    provider.begin()
    provider.request(1)
    assert started.wait(60.0)
    provider.close()
    pool.runs.clear()
    provider.request(2)
    assert not pool.runs


def test_a_node_whose_flow_run_has_ended_leaves_where_nothing_else_is_known(pool, now_s):
    provider = WorkPoolProvider(node_runs=pool, machines=MachinesOfRuns(pool), clock=lambda: now_s[0])
    provider.request(2)
    provider.poll()
    pool.serve()
    provider.poll()
    provider.poll()
    assert {each.status for each in provider.allocations().values()} == {AllocationStatus.RUNNING}
    first, second = pool.runs
    provider.request(1)
    provider.release(first)
    provider.poll()
    provider.poll()
    statuses = {id: each.status for id, each in provider.allocations().items()}
    assert statuses == {first: AllocationStatus.LEAVING, second: AllocationStatus.RUNNING}


def test_flow_runs_that_ended_long_ago_are_forgotten(pool, monkeypatch):
    monkeypatch.setattr("ringmaster.tasks.pool.work_pool.MAX_REMEMBERED", 3)
    machines = MachinesOfRuns(pool)
    runs = [NodeRun(id=f"run-{number}") for number in range(6)]
    for first in range(5):
        machines.poll([runs[5], runs[first]])
    assert machines.poll([runs[5]]).keys() == {"run-3", "run-4", "run-5"}
    assert machines.poll(runs).keys() == {run.id for run in runs}, "whatever lives is reported"


def test_an_unexpected_error_is_reported(pool):
    failed = []
    pool.poll = lambda runs: 1 / 0
    provider = WorkPoolProvider(node_runs=pool, machines=pool, on_failure=lambda: failed.append(True))
    provider.begin()
    provider.close()
    assert failed
