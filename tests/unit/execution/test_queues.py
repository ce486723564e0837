"""A gang whose jobs take turns, while other gangs run, under an executor that re-plans as it measures step times."""

from dataclasses import dataclass, replace

import pytest

from ringmaster.tasks.execution.execution_events import PlanUpdate, SegmentEnded, SegmentStarted
from ringmaster.tasks.execution.replan_policy import ReplanPolicy
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.techniques import Profile, registry
from ringmaster.techniques.processes.gang_events import JobReady, JobResult, Steps
from ringmaster.techniques.profiles import GroupMemberProfile
from ringmaster.techniques.training.fused.group_requirements import AT_ONCE, first_steps, num_steps_of_gang, steps_taken
from tests.fake_engine import FakeEngine, FakeGang
from tests.matrix import matrix
from tests.unit.execution.clocked import clocked_bench
from tests.unit.execution.fakes import job, profile
from tests.unit.execution.groups.grouped import GroupBench
from tests.unit.execution.replanning.test_replan_policy import by_rules

OFTEN = ReplanPolicy(every=0.1, worth_s=0.0)
STEPS = {"a": 100, "b": 90, "c": 80, "d": 70, "e": 60}  # two at a time, the gang takes 230 steps
QUEUE = Profile(
    technique="shared_base",
    config={"at_once": 2},
    num_devices=1,
    num_ranks=1,
    step_s=1.0,
    own_step_s=0.5,
    peak_bytes=1,
    members=tuple(
        GroupMemberProfile(job=name, num_steps=num, step_s=0.5) for name, num in STEPS.items() if name != "a"
    ),
)


@dataclass
class Turns(FakeGang):
    """A gang whose jobs take turns. Its step counts are the gang's, not one job's."""

    @classmethod
    def of(cls, gang, first):
        every = [gang.call.order, *gang.call.order.members]
        turns = cls(**{**vars(gang), "first_step": 0, "step": 0})
        turns.every, turns.first = every, first
        turns.left = [max(0, order.last_step - first[order.job.name]) for order in every]
        turns.last_step = num_steps_of_gang(turns.left, at_once=turns.at_once)
        return turns

    @property
    def at_once(self):
        return self.call.order.config.get(AT_ONCE)

    def taken(self, after):
        return steps_taken(self.left, at_once=self.at_once, after=after)


class Queues(FakeEngine):
    """Clocked gangs in which the jobs of a group take turns."""

    def start(self, call):
        future = super().start(call)
        if call.order.members:
            first = {o.job.name: self.steps.get(o.job.name, 0) for o in (call.order, *call.order.members)}
            gang = self.gangs[call.number] = Turns.of(self.gangs[call.number], first)
            self._begin_chunk(gang)
        return future

    def _go_on(self, gang):
        if not isinstance(gang, Turns):
            super()._go_on(gang)
            return
        before, after = gang.taken(gang.step), gang.taken(gang.step + gang.chunk)
        joined = first_steps(gang.left, at_once=gang.at_once)
        for order, at, old, new in zip(gang.every, joined, before, after, strict=True):
            name = order.job.name
            self.steps[name] = gang.first[name] + new
            if gang.step <= at < gang.step + gang.chunk and name != gang.call.order.job.name:
                gang.call.on_event(JobReady(job=name, step=gang.first[name]))
            if new > old:
                seconds = [gang.step_s] * (new - old)
                event = Steps(job=name, first_step=gang.first[name] + old, seconds=tuple(seconds))
                gang.call.on_event(event)
        gang.step, gang.since_s = gang.step + gang.chunk, gang.next_s
        if gang.step < gang.last_step and not gang.stops:
            self._begin_chunk(gang)
            return
        mine, *theirs = [self._outcome(order) for order in gang.every]
        members = {order.job.name: JobResult(**its) for order, its in zip(gang.every[1:], theirs, strict=True)}
        self.end(gang, mine.pop("status"), **mine, first_step=0, members=members)

    def _outcome(self, order):
        step = self.steps[order.job.name]
        metrics = {"metrics": {"loss": 1.0}} if step == order.job.total_steps else {}
        return {"status": "done" if step >= order.last_step else "preempted", "step": step, **metrics}


def bench_of(folder, *, others, factor=1.0, make_plan=by_rules, queue=QUEUE, steps=STEPS):
    """A batch of the queue and of `others` by seconds. A step of the queue takes `factor` times its profiled time."""
    jobs = [job(name, num_steps=num) for name, num in steps.items()]
    jobs += [job(name, num_steps=num) for name, num in others.items()]
    speeds = {(name, registry.dotted_path("single"), 1): 1.0 for name in (*steps, *others)}
    gangs = Queues(speeds | {("a", registry.dotted_path("shared_base"), 1): queue.gang_step_s * factor})
    options = {"make_plan": make_plan, "policy": OFTEN, "kind": GroupBench, "together": (queue,)}
    return clocked_bench(folder, jobs, gangs, profiles={each.name: (profile(),) for each in jobs}, **options)


@pytest.mark.parametrize("factor", matrix([0.5, 1.0, 3.0], quick=[0.5]))
def test_a_queue_is_one_gang_until_its_last_job_is_through(tmp_path, factor):
    """The gang also continues after its lead job has finished, while other jobs start and end on the other device."""
    bench = bench_of(tmp_path, others={"x": 60, "y": 50, "z": 40}, factor=factor)
    assert bench.run()
    assert bench.statuses == dict.fromkeys((*STEPS, "x", "y", "z"), JobStatus.DONE)
    gangs = [event for event in bench.told(SegmentStarted) if event.members]
    assert [(event.segment.job, event.members) for event in gangs] == [("a", ("b", "c", "d", "e"))]
    (ended,) = (event for event in bench.told(SegmentEnded) if event.segment.job == "a")
    assert ended.outcome.status == "done"
    assert bench.runner.now_s == pytest.approx(230 * 1.5 * factor)
    first = bench.told(PlanUpdate)[0].problem.job("a").options[0]
    assert first.runtime_s == pytest.approx(230 * 1.0 - 130 * 0.5 + 300 * 0.5)


def test_a_queue_that_moves_goes_on_as_one(tmp_path):
    """The plan has the queue in two segments: the second takes over the jobs that had not started."""

    def in_two_parts(problem):
        plan = by_rules(problem)
        row = problem.job("a")
        if any(s.job == "a" for s in plan.segments) and row.options[0].runtime_s > 250:
            (whole,) = (s for s in plan.segments if s.job == "a")
            middle_s = (whole.start_s + whole.end_s) / 2
            devices = ((problem.nodes[0].id, (1 - whole.devices[0][1][0],)),)
            parts = (
                replace(whole, end_s=middle_s, work=0.5),
                replace(whole, start_s=middle_s, work=0.5, devices=devices),
            )
            return replace(plan, segments=(*(s for s in plan.segments if s.job != "a"), *parts))
        return plan

    bench = bench_of(tmp_path, others={}, make_plan=in_two_parts)
    assert bench.run()
    assert bench.statuses == dict.fromkeys(STEPS, JobStatus.DONE)
    gangs = [(event.segment.last_step, event.members) for event in bench.told(SegmentStarted)]
    assert gangs == [(50, ("b",)), (100, ("b", "c", "d", "e"))]


def test_others_wait_for_a_group_that_outlives_its_leader(tmp_path):
    """In a resumed batch the lead job may be ahead of the members: the group's devices stay busy after its end."""
    steps, others = {"a": 40, "b": 90, "c": 80, "d": 70, "e": 60}, {"x": 60, "y": 50, "z": 40}
    queue = replace(QUEUE, config={}, members=tuple(replace(f, num_steps=steps[f.job]) for f in QUEUE.members))
    bench = bench_of(tmp_path, others=others, factor=0.5, queue=queue, steps=steps)
    assert bench.run()
    assert bench.statuses == dict.fromkeys((*steps, *others), JobStatus.DONE)
    assert bench.runner.now_s == pytest.approx(sum(others.values()))  # these train on the other device meanwhile
