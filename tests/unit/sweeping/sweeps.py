"""Sweeps without gangs: an executor whose fake gangs report a loss computed from the learning rate and the step."""

import math
from dataclasses import replace
from pathlib import Path
from random import Random

from ringmaster.features.rung_evaluation.row_parts import mean_of, place_of, rows_of
from ringmaster.tasks.storage.journal import begin_jobs
from ringmaster.tasks.sweeping.early_stopping import StoppingPolicy
from ringmaster.tasks.sweeping.ranking import Ranking
from ringmaster.tasks.sweeping.scheduler import SweepScheduler
from ringmaster.tasks.sweeping.space import CategoricalRange, Range
from ringmaster.tasks.sweeping.spec import SweepSpec
from ringmaster.techniques.processes.gang_events import (
    EvaluationReported,
    JobResult,
    Outcome,
    PartialEvaluation,
    RowValues,
)
from tests.unit.execution.fakes import Bench, FakeRunner

TEMPLATE = {
    "model": {"architecture": "ViTForImageClassification", "config": {"image_size": 8, "patch_size": 2}},
    "data": {"source": "digits"},
    "num_steps": 64,
}
RATES = Range(key="optimizer.lr", low=1e-5, high=1e-1, is_log=True)
SEEDS = CategoricalRange(key="seed", values=(0, 1, 2))


def spec(*, policy="asha", sampler="random", space=(RATES,), num_trials=16, **changes):
    stopping = changes.pop("stopping", StoppingPolicy(policy=policy, min_steps=4, reduction_factor=4))
    found = SweepSpec(
        name="rates",
        template=TEMPLATE,
        folder=Path(),
        space=tuple(space),
        sampler=sampler,
        stopping=stopping,
        ranking=Ranking(metric=changes.pop("objective", "loss")),
        num_trials=num_trials,
        num_parallel=2,
        devices={"cpu": 2},
    )
    return replace(found, **changes)


def loss(job, step):
    """A loss that is lower the closer the rate is to 3e-3. Differences grow with the step."""
    return 1.0 + abs(math.log10(job.optimizer.lr / 3e-3)) * (1.0 + step / 64) + 1.0 / (1 + step)


NUM_ROWS = 400
SHARED = tuple(Random(row).gauss(0, 1.0) for row in range(NUM_ROWS))  # what each row has with all jobs


def evaluated_part(job, part):
    """What a gang reports of a part: each row has the job's loss, what all jobs have there, and what is drawn."""
    draw = Random(f"{job.name} {part.step}")
    noise = [draw.gauss(0, 0.6) for _ in range(NUM_ROWS)]
    centers = sum(SHARED) / NUM_ROWS + sum(noise) / NUM_ROWS
    every = [loss(job, part.step) + a + b - centers for a, b in zip(SHARED, noise, strict=True)]
    values = tuple(every[row] for row in rows_of(part, NUM_ROWS))
    rows = RowValues(values=values, counts=(1.0,) * len(values))
    reported = PartialEvaluation(begin=place_of(part.begin, NUM_ROWS), whole=NUM_ROWS, rows=rows)
    return EvaluationReported(step=part.step, metrics={"loss": mean_of(reported)}, num_rows=len(values), part=reported)


class Killed(Exception):
    """Stands for the sudden death of the process."""


class DyingInbox:
    """An inbox that ends the process after a number of messages."""

    def __init__(self, inbox, num_messages):
        self.inbox, self.put, self.empty, self.left = inbox, inbox.put, inbox.empty, num_messages

    def get(self, timeout=None):
        self.left -= 1
        if self.left < 0:
            raise Killed
        return self.inbox.get(timeout)


class Gangs(FakeRunner):
    """Fake gangs that evaluate as a trainer does, also when there is nothing left to train."""

    def measure(self, job, step):
        """The metrics of a job after a step."""
        return {"loss": loss(job, step)}

    def end_one(self):
        call, future = self.running.pop(self.draw.randrange(len(self.running)))
        job, last = call.order.job, call.order.last_step
        first = self.steps.get(job.name, 0)
        due = [step for step in range(first + 1, last + 1) if job.is_evaluated(step)]
        for step in due or ([first] if first == last and first and first < job.num_steps else []):
            call.on_event(EvaluationReported(step=step, metrics=self.measure(job, step)))
        self.steps[job.name] = last
        self.num_steps = getattr(self, "num_steps", 0) + last - first
        metrics = self.measure(job, last) if last == job.num_steps else None
        future.set_result(Outcome(status="done", result=JobResult(first_step=first, step=last, metrics=metrics)))


class Swept:
    """A process that schedules a sweep in a folder. A second one on the same folder resumes it."""

    def __init__(
        self,
        folder,
        asked,
        *,
        runner=None,
        dies_after=None,
        clock=lambda: 0.0,
        cannot_train=lambda job: False,
        stop_rules=(),
    ):
        self.jobs = asked.batch().jobs
        self.faults = {job.name: "no technique can train it here" for job in self.jobs if cannot_train(job)}
        self.notices = []
        self.sweep_scheduler = SweepScheduler(asked, stop_rules=stop_rules, notice=self.notices.append, clock=clock)
        self.bench = Bench(folder, self.jobs, runner=runner or Gangs(), steering=self.sweep_scheduler)
        self.bench.make_no_forecasts()
        if dies_after is not None:
            self.bench.executor._inbox = DyingInbox(self.bench.runner, dies_after)

    def run(self):
        journal = self.bench.journal
        begin_jobs(journal, self.jobs, faults=self.faults)
        self.sweep_scheduler.begin(journal, [job for job in self.jobs if job.name not in self.faults], num_slots=2)
        for name, changes in self.sweep_scheduler.record_changes().items():
            journal.write_job(name, **changes)
        self.bench.run()
        return self

    @property
    def statuses(self):
        return self.bench.statuses

    def names(self, status):
        return [name for name, found in self.statuses.items() if found == status]
