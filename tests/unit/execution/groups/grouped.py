"""A batch whose first job leads a group, and fake gangs that train groups."""

from dataclasses import replace

from ringmaster.tasks.execution.job_rows import JobTableEntry
from ringmaster.techniques import Profile
from ringmaster.techniques.processes.gang_events import JobResult, Outcome
from ringmaster.techniques.profiles import GroupMemberProfile
from tests.unit.execution.fakes import Bench, FakeRunner, job


def group(*members, num_steps=10, num_devices=1, **config):
    """An option of a group with `members`. Each member adds half a second to a step."""
    return Profile(
        technique="shared_base",
        config={"recompute": "none", **config},
        num_devices=num_devices,
        num_ranks=num_devices,
        step_s=1.0,
        peak_bytes=1,
        members=tuple(GroupMemberProfile(job=name, num_steps=num_steps, step_s=0.5) for name in members),
    )


class GroupBench(Bench):
    """A batch whose first job leads the others. `told_gangs` lists the commands that its gangs got."""

    def __init__(self, folder, jobs, *, together=None, **options):
        self._together = together or (group(*(each.name for each in jobs[1:])),)
        super().__init__(folder, jobs, **options)
        self.told_gangs = []
        self.runner.send = lambda number, command: self.told_gangs.append(command)

    def entry(self, job, *profiles):
        together = self._together if job.name == self.jobs[0].name else ()
        return JobTableEntry(job_in_batch=job, job=job, profiles=profiles, paths=self.paths, group_profiles=together)


def outcome_of(call, runner, order, *, step=None):
    name = order.job.name
    runner.steps[name] = step = max(order.last_step if step is None else step, runner.steps.get(name, 0))
    metrics = {"loss": 1.0} if step == order.job.total_steps else None
    return JobResult(status="done", step=step, metrics=metrics)


def stopped_at(step, members, **changes):
    """The outcome of a gang that was stopped, with all of its jobs at that step."""
    theirs = {name: JobResult(status="preempted", step=step) for name in members}
    return Outcome(**{"status": "preempted", "result": JobResult(step=step, members=theirs), **changes})


def all_done(call, runner, **members):
    """The outcome of a gang that finishes. members: results that replace those of some member jobs."""
    mine = outcome_of(call, runner, call.order)
    theirs = {
        order.job.name: members.get(order.job.name) or outcome_of(call, runner, order) for order in call.order.members
    }
    return Outcome(status="done", result=replace(mine, first_step=0, members=theirs))


def bench_of(folder, *acts, names="abc", num_steps=10, **options):
    runner = FakeRunner(script={names[0]: list(acts)})
    return GroupBench(folder, [job(name, num_steps=num_steps) for name in names], runner=runner, **options)
