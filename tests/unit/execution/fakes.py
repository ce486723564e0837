"""Fake planner, engine and leases for tests of the executor, which then needs no gang."""

import math
import random
from concurrent.futures import Future
from dataclasses import replace

from ringmaster.errors import ProblemError
from ringmaster.tasks.cluster import Cluster, Node
from ringmaster.tasks.execution.execution_events import PlanUpdate, SegmentEnded, SegmentStarted
from ringmaster.tasks.execution.executor import Executor
from ringmaster.tasks.execution.job_rows import JobTableEntry
from ringmaster.tasks.execution.job_table import JobTable
from ringmaster.tasks.execution.replan_policy import ReplanPolicy
from ringmaster.tasks.execution.replanner import Replanner
from ringmaster.tasks.execution.run_paths import RunPaths
from ringmaster.tasks.planning import Plan, Segment
from ringmaster.tasks.profiling.search import planning_problem
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import Journal, begin_jobs
from ringmaster.techniques import DataSpec, Job, ModelSpec, Profile
from ringmaster.techniques.processes.gang_events import CheckpointSaved, JobResult, Outcome
from tests.fake_engine import FakeEngine, cpu_devices


def open_journal(folder, cls=Journal):
    """The journal of a batch in `folder`. It does not sync to disk: faster, and safe without a power failure."""
    return cls(Database(file_url(folder / "journal.db"), synced=False), batch="")


def job(name, *, base=None, num_steps=10, **changes):
    model, data = ModelSpec(factory="a:b"), DataSpec(factory="a:c")
    return Job(name=name, model=model, data=data, base=base, num_steps=num_steps, **changes)


def profile(technique="single", num_devices=1, step_s=1.0):
    num_ranks = 1 if technique == "single" else num_devices
    return Profile(
        technique=technique, num_devices=num_devices, num_ranks=num_ranks, step_s=step_s, peak_bytes=1, save_s=0.1
    )


def cluster(num_devices):
    return Cluster(nodes=(Node(name="here", devices=cpu_devices(num_devices)),))


def in_a_row(problem, *, num_parts=1):
    """A plan by list scheduling in the order of the jobs, under each job's first option, in `num_parts` equal parts."""
    node = problem.nodes[0]
    free_s, ended_s, segments = [0.0] * node.num_devices, {}, []
    left = list(problem.jobs)
    while left:
        row = next(r for r in left if all(other in ended_s for other in r.after))
        left.remove(row)
        option = row.options[0]
        for _ in range(num_parts):
            devices = tuple(sorted(sorted(range(node.num_devices), key=lambda i: free_s[i])[: option.num_devices]))
            start_s = max([free_s[i] for i in devices] + [ended_s.get(name, 0.0) for name in (*row.after, row.id)])
            end_s = start_s + option.runtime_s / num_parts
            segments.append(Segment(row.id, 0, start_s, end_s, 1 / num_parts, 0.0, ((node.id, devices),)))
            ended_s[row.id] = end_s
            for i in devices:
                free_s[i] = end_s
    return Plan(problem.name, tuple(segments))


class FakeRunner(FakeEngine):
    """Gangs that end when the executor's inbox is empty, in an order drawn from `seed`.

    script: by job, functions that make the outcomes of its next gangs, each called with (call, runner); later gangs end
    as done. `steps` represents the checkpoints on disk, which outlive an executor.
    """

    def __init__(self, seed=0, *, script=None, steps=None):
        super().__init__(steps={} if steps is None else steps)
        self.draw, self.script, self.running = random.Random(seed), {} if script is None else script, []

    def start(self, call):
        future = Future()
        self.calls.append(call)
        self.running.append((call, future))
        return future

    def send(self, number, command):
        """Gangs here end by themselves."""

    def _go_on_until(self, until_s):
        if not self.running:
            return super()._go_on_until(until_s)
        self.end_one()
        return True

    def end_one(self):
        call, future = self.running.pop(self.draw.randrange(len(self.running)))
        acts = self.script.get(call.order.job.name)
        try:
            outcome = acts.pop(0)(call, self) if acts else done(call, self)
        except OSError as error:
            future.set_exception(error)
        else:
            future.set_result(outcome)

    def names(self):
        return [call.order.job.name for call in self.calls]


def _result(call, runner, step):
    first = runner.steps.get(call.order.job.name, 0)
    runner.steps[call.order.job.name] = step = max(step, first)
    metrics = {"loss": 1.0} if step == call.order.job.total_steps else None
    return JobResult(first_step=first, step=step, metrics=metrics)


def done(call, runner):
    return Outcome.of(replace(_result(call, runner, call.order.last_step), status="done"))


def preempted(call, runner):
    return Outcome.of(replace(_result(call, runner, runner.steps.get(call.order.job.name, 0)), status="preempted"))


def ends(status, message="as it should"):
    return lambda call, runner: Outcome(status=status, message=message)


def crashes_after(num_steps):
    """An outcome for `FakeRunner.script`: the gang crashes after it has checkpointed `num_steps` more steps."""

    def act(call, runner):
        step = _result(call, runner, runner.steps.get(call.order.job.name, 0) + num_steps).step
        call.on_event(CheckpointSaved(step=step, seconds=0.1))
        return Outcome(status="crashed", message="as it should")

    return act


class LeasesInMemory:
    """An in-memory ledger of leases, for speed."""

    def __init__(self):
        self._held = {}

    def take_each(self, gangs, *, holder):
        are_taken = []
        for devices in gangs:
            are_taken.append(self._held.keys().isdisjoint(devices))
            if are_taken[-1]:
                self._held |= dict.fromkeys(devices, holder)
        return are_taken

    def give_back(self, devices):
        for device in devices:
            del self._held[device]

    def held(self):
        return dict(self._held)


# Re-plans only where it must, and tries nothing.
CALM = ReplanPolicy(every=10.0, surprise=10.0, optimism=0.0, most_explored=0)


def at_once(think):
    """Computes a plan in the foreground: the returned future is already done."""
    future = Future()
    try:
        future.set_result(think())
    except ProblemError as error:
        future.set_exception(error)
    return future


class Bench:
    """One batch under test with its journal in `folder`. A new instance on the same folder represents a new process."""

    def __init__(
        self,
        folder,
        jobs,
        *,
        profiles=None,
        num_devices=2,
        runner=None,
        journal=None,
        make_plan=in_a_row,
        leases=None,
        steering=None,
        policy=CALM,
        add_terms=lambda problem: problem,
    ):
        self.jobs, self.runner = jobs, runner or FakeRunner()
        self.journal = journal or open_journal(folder)
        self.events, self.plans, self.other_listeners, self.expected_faults = [], [], [], []
        self.leases = leases or LeasesInMemory()  # new by default: the leases of an ended process are void
        self.paths, self.cluster = RunPaths(folder=folder, cache_dir=folder), cluster(num_devices)

        def plan(problem):
            self.plans.append(problem)
            return make_plan(problem)

        self.plan, self._add_terms = plan, add_terms
        begin_jobs(self.journal, jobs, faults={})
        job_table = JobTable(self.journal)
        job_table.add(self.entry(each, *(profiles[each.name] if profiles else (profile(),))) for each in jobs)
        clock = self.runner.clock

        def wall_clock():
            return self.runner.epoch_s + clock()

        self.executor = Executor(
            cluster=self.cluster,
            leases=self.leases,
            holder="test",
            job_table=job_table,
            engine=self.runner,
            replanner=Replanner(
                name="batch",
                make_plan=plan,
                add_terms=add_terms,
                policy=policy,
                clock=clock,
                wall_clock=wall_clock,
                background=at_once,
            ),
            listeners=[self.events.append, self._watch_devices, self._tell_others],
            steering=steering,
            clock=clock,
            wall_clock=wall_clock,
        )
        self.runner.messages.clear()  # those of a former executor
        self.executor._inbox = self.runner
        self._busy = {}

    def entry(self, job, *profiles):
        return JobTableEntry(job_in_batch=job, job=job, profiles=profiles, paths=self.paths)

    def make_no_forecasts(self):
        """Saves a third of the time: by the clocks of gangs forecasts take none, and more are made than in a run."""
        self.executor._forecaster._free_s = math.inf

    def read_journal(self):
        """Reads the state of the jobs again, as another executor would."""
        self.executor.job_table._read(self.executor.job_table.entries)

    def first_plan(self):
        """Returns the plan to begin with, as a run on this machine makes it; None where nothing is left to plan."""
        table = self.executor.job_table
        self.executor._outcome_policy.fail_orphans()
        if not (jobs := table.left()):
            return None
        done = {name: record.step for name, record in table.records.items()}
        problem = self._add_terms(planning_problem(jobs, table.profiles, self.cluster, name="batch", steps_done=done))
        why = "resumed" if self.journal.plans() else "start"
        return PlanUpdate(problem=problem, plan=self.plan(problem), why=why)

    def run(self):
        self.read_journal()
        self.executor._first_plan = self.first_plan()
        is_over = self.executor.run()
        assert list(self.executor.listener_faults.values()) == self.expected_faults
        return is_over

    def _tell_others(self, event):
        for listener in self.other_listeners:
            listener(event)

    def _watch_devices(self, event):
        if isinstance(event, SegmentStarted):
            for device in event.segment.devices:
                assert device not in self._busy, f"{device} serves two"
                self._busy[device] = event.number
        if isinstance(event, SegmentEnded):
            self._busy = {device: number for device, number in self._busy.items() if number != event.number}

    def told(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def statuses(self):
        return {name: record.status for name, record in self.journal.jobs().items()}
