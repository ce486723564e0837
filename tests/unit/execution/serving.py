"""An executor that serves on a simulated clock, where jobs and devices come and go at times that a test sets."""

from dataclasses import replace

from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.execution.execution_events import JobEnded, SegmentStarted
from ringmaster.tasks.execution.replan_policy import ReplanPolicy
from ringmaster.tasks.planning import Plan
from ringmaster.techniques import registry
from ringmaster.techniques.processes.gang_events import OutcomeStatus
from tests.fake_engine import FakeEngine
from tests.unit.execution.clocked import clocked_bench
from tests.unit.execution.fakes import cluster, in_a_row, job

CALM = ReplanPolicy(every=10.0, surprise=10.0)  # re-plans only where it must


def two_nodes():
    (node,) = cluster(1).nodes
    return Cluster(nodes=(replace(node, name="n1"), replace(node, name="n2")))


def over_nodes(problem):
    """Plans jobs one after another, each on the device that is free first; a running job keeps its device."""
    free_s = {(node.id, i): 0.0 for node in problem.nodes for i in range(node.num_devices)}
    parts = []
    for row in sorted(problem.jobs, key=lambda row: row.running is None):
        device = min(free_s, key=lambda d: (free_s[d], d))
        if row.running is not None:
            ((name, (number,)),) = row.running.devices
            device = (name, number)
        one = in_a_row(replace(problem, jobs=(replace(row, after=()),)))
        start_s = free_s[device]
        free_s[device] += row.options[0].runtime_s
        parts.append(
            replace(one.segments[0], start_s=start_s, end_s=free_s[device], devices=((device[0], (device[1],)),))
        )
    return Plan(problem.name, tuple(parts))


class Pool:
    """An executor that serves on a simulated clock. `at` schedules an action, and `serve` runs until a given time."""

    def __init__(self, folder, names, *, num_steps=100, make_plan=over_nodes, nodes=None, step_s=1.0):
        self.jobs = [job(name, num_steps=num_steps) for name in names]
        speeds = {(n, registry.dotted_path("single"), 1): step_s for n in [*names, "x", "y"]}
        self.gangs = FakeEngine(speeds)
        self.bench = clocked_bench(folder, self.jobs, self.gangs, make_plan=make_plan, policy=CALM)
        self.executor, self.at = self.bench.executor, self.gangs.at
        self.executor._plan_manager.cluster = nodes or two_nodes()

    def serve(self, *, until_s):
        self.at(until_s, self.executor.stop_starting)
        self.executor.replan_soon(why="begin")
        self.executor.serve()

    def lose(self, name):
        """Removes the gang of a job, as if its node had vanished."""
        self.gangs.end(self.gangs.gang(name), OutcomeStatus.LOST, "its node is gone")

    @property
    def statuses(self):
        return self.bench.statuses

    def started(self, name):
        return [e for e in self.bench.told(SegmentStarted) if e.segment.job == name]

    def ended_s(self, name):
        return next((i for i, e in enumerate(self.bench.events) if isinstance(e, JobEnded) and e.job == name), None)
