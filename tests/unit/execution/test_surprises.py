"""Random events in random order. No device serves two gangs, every job ends as expected, no step or lease is lost."""

import random
from concurrent.futures import Future
from dataclasses import replace

import pytest

from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.execution.execution_events import JobEnded, SegmentEnded, SegmentStarted
from ringmaster.tasks.storage.journal import JobStatus, begin_jobs
from ringmaster.techniques import registry
from ringmaster.techniques.processes.gang_events import CheckpointSaved, OutcomeStatus
from tests.unit.execution.fakes import cluster, job, profile
from tests.unit.execution.serving import Pool, over_nodes

NODES = ("n1", "n2", "n3")
HORIZON_S, REST_S = 300.0, 3000.0


class Surprises:
    """Draws random events for a pool of one-device nodes, and records the expected end of each job."""

    def __init__(self, folder, seed):
        self.draw = random.Random(seed)
        (node,) = cluster(1).nodes
        self.nodes = {name: replace(node, name=name) for name in NODES}
        self.up, self.out, self.held = set(NODES), set(), set()
        self.pool = Pool(folder, ["j0", "j1", "j2"], make_plan=over_nodes, nodes=self.cluster(), num_steps=60)
        self.executor, self.gangs = self.pool.executor, self.pool.gangs
        self.jobs = {each.name: each for each in self.pool.jobs}
        self.cancelled, self.crashes = set(), {}
        self.executor._plan_manager.replanner._background = self.think_a_while
        turn, self.num_turns = self.executor._turn, 0

        def counted():
            self.num_turns += 1
            assert self.num_turns < 20_000, f"it turns and turns at {self.gangs.now_s} s"
            turn()

        self.executor._turn = counted
        acts = (self.add_jobs, self.cancel, self.pause, self.resume, self.lose, self.find, self.crash, self.hold)
        acts += (self.release, self.sicken, self.heal, self.preempt, self.replan)
        for _ in range(60):
            self.pool.at(self.draw.uniform(0.0, HORIZON_S), self.draw.choice(acts))
        self.pool.at(HORIZON_S, self.calm)

    def cluster(self):
        return Cluster(nodes=tuple(self.nodes[name] for name in NODES if name in self.up))

    def move(self, why):
        self.executor.move_to(self.cluster(), out={(name, 0) for name in self.out & self.up}, why=why)

    def some_job(self):
        return self.draw.choice(list(self.jobs))

    def some_gang(self):
        return self.draw.choice([None, *self.gangs.gangs.values()])

    def end(self, gang, status, **result):
        """Ends a gang with a failure. Half of the steps since its start have been checkpointed."""
        name = gang.call.order.job.name
        kept = gang.first_step + (gang.step - gang.first_step) // 2
        if kept > gang.first_step:
            gang.call.on_event(CheckpointSaved(step=kept, seconds=0.1))
        self.gangs.steps[name] = kept
        result = {"step": kept, **result} if status == "preempted" else {}
        self.gangs.end(gang, status, "as it should", **result)

    def think_a_while(self, think):
        """A background planner whose plan arrives some seconds after the request, whatever has happened since."""
        future = Future()
        self.pool.at(self.gangs.now_s + self.draw.choice([0.0, 2.0, 7.0]), lambda: future.set_result(think()))
        return future

    # -- random events -------------------------------------------------------------------------------------------------

    def add_jobs(self):
        if len(self.jobs) == 12:
            return
        name = f"j{len(self.jobs)}"
        alive = [each for each in self.jobs if self.pool.statuses[each] not in (JobStatus.CANCELLED, JobStatus.FAILED)]
        base = self.draw.choice([None, None, *alive])
        new = self.jobs[name] = job(name, base=base, num_steps=self.draw.choice([1, 20, 90]))
        self.gangs.step_s[name, registry.dotted_path("single"), 1] = self.draw.choice([0.5, 1.0, 3.0])
        begin_jobs(self.pool.bench.journal, [new], faults={})
        self.executor.add_jobs([self.pool.bench.entry(new, profile())], why=f"{name} was added")

    def cancel(self):
        name = self.some_job()
        if self.draw.random() < 0.3 and self.pool.statuses[name] not in (JobStatus.DONE, JobStatus.FAILED):
            self.cancelled.add(name)
            self.executor.cancel([name], message="no longer wanted")

    def pause(self):
        self.executor.pause([self.some_job()])

    def resume(self):
        self.executor.resume([self.some_job()])

    def lose(self):
        name = self.draw.choice(NODES)
        if name not in self.up:
            return
        self.up.discard(name)
        for gang in [g for g in self.gangs.gangs.values() if (name, 0) in g.call.devices]:
            self.end(gang, OutcomeStatus.LOST)
        self.pool.at(self.gangs.now_s, lambda: self.move(f"{name} is gone"))  # after the gangs of the node have ended

    def find(self):
        self.up.add(self.draw.choice(NODES))
        self.move("a node came")

    def crash(self):
        if (gang := self.some_gang()) is not None:
            name = gang.call.order.job.name
            self.crashes[name] = self.crashes.get(name, 0) + 1
            self.end(gang, "crashed")

    def preempt(self):
        if (gang := self.some_gang()) is not None:
            self.end(gang, "preempted")

    def hold(self):
        self.held.add(name := self.draw.choice(NODES))
        self.executor.hold(name)

    def release(self):
        self.held.discard(name := self.draw.choice(NODES))
        self.executor.release(name)

    def sicken(self):
        self.out.add(self.draw.choice(NODES))
        self.move("a device is unwell")

    def heal(self):
        self.out.discard(self.draw.choice(NODES))
        self.move("a device is well")

    def replan(self):
        self.executor.replan_soon(why="priorities changed")

    def calm(self):
        """Restores all nodes and devices for the rest of the run."""
        self.up, self.out = set(NODES), set()
        self.move("all nodes are there")
        for name in NODES:
            self.executor.release(name)
        self.executor.resume(list(self.jobs))


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 24))])
def test_whatever_comes(tmp_path, seed):
    surprises = Surprises(tmp_path, seed)
    pool = surprises.pool
    pool.serve(until_s=REST_S)
    statuses, started = pool.statuses, pool.bench.told(SegmentStarted)
    for name, each in surprises.jobs.items():
        if name in surprises.cancelled:
            assert statuses[name] == JobStatus.CANCELLED, name
        elif each.base is not None and statuses[each.base] in (JobStatus.CANCELLED, JobStatus.FAILED):
            assert statuses[name] == JobStatus.FAILED, name
        elif statuses[name] == JobStatus.FAILED:
            assert surprises.crashes.get(name, 0) >= 3, name
        else:
            assert statuses[name] == JobStatus.DONE, name
    ends = [event.job for event in pool.bench.told(JobEnded)]
    assert sorted(ends) == sorted(set(ends)), "each end is told once"
    assert sorted(e.number for e in started) == sorted(e.number for e in pool.bench.told(SegmentEnded))
    for name, record in pool.bench.journal.jobs().items():
        steps = [e.first_step for e in started if e.segment.job == name]
        assert steps == sorted(steps), f"{name} began again from before where it had been"
        if record.status == JobStatus.DONE:
            assert record.step == surprises.jobs[name].total_steps
        assert record.status != JobStatus.PAUSED
    assert pool.bench.leases.held() == {}
    assert pool.gangs.gangs == {} and pool.executor._plan_progress.running == {}
