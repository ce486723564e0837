"""The choice of batch size and precision on the way to a target: a steering policy of the executor.

A job that may vary them first trains a probe, a tenth of its steps, with its own. With the noise scale of the gradient
that the probe has measured, the planner compares for each permitted pair

    (predicted steps to the target) x (predicted seconds of a step under the options of the profile)

and takes the least, unless it gains less than `LEAST_GAIN`. The job then stops at a checkpoint and is planned anew with
the options of the other batch size. A choice is a function of what was measured in the first nine tenths of the probe,
and is written to the journal before it is acted upon: after a kill, it is made again or repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringmaster.codec import from_json, to_json
from ringmaster.tasks.execution.events import ExecutionEvent, GangReport, JobEnded, SegmentEnded
from ringmaster.tasks.execution.job_table import GOAL, SteeringRequest
from ringmaster.tasks.storage.journal import ENDED, Journal
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.job import TrainingPhase
from ringmaster.techniques.processes.events import Steps
from ringmaster.techniques.training.noise_scale import (
    GradientNoise,
    NoiseBlock,
    learning_rate_factor,
    noise_blocks,
    probe_steps,
    ratio_interval,
    steps_ratio,
)

FACT = "targets"  # a fact of the batch: {"noise": by job, "choices": by job}
LEAST_GAIN = 0.15
"""The least share of the remaining time that a change must be predicted to save."""
DECIDED_AFTER = 0.9
"""The share of a probe whose measurements decide, so that a job that keeps its batch size need not stop."""
LEAST_MEASURED = 10  # steps with measurements, without which nothing is changed

Variant = tuple[int, str]
"""A batch size and a precision."""


@dataclass(frozen=True, kw_only=True)
class VariantChoice:
    """What was chosen for the rest of a job, and why.

    first_step: the step with which it begins.
    global_batch_size, precision: the job's own where nothing changes.
    lr_factor: of the learning rate.
    num_steps: the number of the job's steps from now on.
    steps: the predicted steps of the rest, in place of those that the job has left, with the interval in which they are
        expected.
    gain: the factor by which the rest is predicted to be quicker.
    noise_scale: of the probe, in samples; None where it was not measured.
    why: in words.
    """

    first_step: int
    global_batch_size: int
    precision: str
    lr_factor: float
    num_steps: int
    steps: tuple[int, int, int]
    gain: float
    noise_scale: float | None
    why: str

    def phases(self, job: Job) -> tuple[TrainingPhase, ...]:
        """Returns the phases of the job with this choice; none where it changes nothing."""
        own = job.phase(0)
        if (self.global_batch_size, self.precision) == (own.global_batch_size, own.precision):
            return ()
        chosen = TrainingPhase(
            first_step=self.first_step,
            global_batch_size=self.global_batch_size,
            precision=self.precision,
            lr_factor=self.lr_factor,
            num_steps=self.num_steps,
        )
        return own, chosen


def choose_variant(
    job: Job, measured: Sequence[GradientNoise], *, first_step: int, step_s: Mapping[Variant, float]
) -> VariantChoice:
    """Returns the batch size and the precision with which the rest of a job is predicted to be the quickest.

    Args:
        job: the job as it was written.
        measured: the noise of its gradients in the probe.
        first_step: the step from which it may change.
        step_s: the seconds of a step, for each variant that can be trained.
    """
    size, precision = own = (job.global_batch_size, job.precision)
    left, blocks = job.total_steps - first_step, noise_blocks(measured)
    is_known = len(measured) >= LEAST_MEASURED
    scale = _whole(blocks).scale if is_known else None

    def ratio(new_size: int) -> float:
        return 1.0 if new_size == size else steps_ratio(blocks, size=size, new_size=new_size)

    offered = [v for v in job.may_vary.choices(job) if v in step_s and (v[0] == size or is_known)]
    best = min(offered, key=lambda variant: ratio(variant[0]) * step_s[variant], default=own)
    gain = step_s[own] / (ratio(best[0]) * step_s[best]) if own in step_s else 1.0
    where = f"{job.name} keeps batches of {size} samples in {precision}"
    if best == own or 1 - 1 / gain < LEAST_GAIN:
        why = f"no other choice is predicted to save {LEAST_GAIN:.0%} of the rest"
        if not is_known and len(job.may_vary.global_batch_size) > 1:
            why = "the noise scale was not measured, which takes single, ddp or fsdp"
        return VariantChoice(
            first_step=first_step,
            global_batch_size=size,
            precision=precision,
            lr_factor=1.0,
            num_steps=job.total_steps,
            steps=(left, left, left),
            gain=1.0,
            noise_scale=scale,
            why=f"{where}: {why}",
        )
    low, high = (1.0, 1.0) if best[0] == size else ratio_interval(blocks, size=size, new_size=best[0])
    steps = tuple(-int(-left * each // 1) for each in (ratio(best[0]), low, high))
    # A constant rate may train on for as long as the target may take. A schedule that decays must come to its end.
    longest = min(steps[2], left) if job.schedule.name == "constant" else steps[0]
    factor = 1.0
    if best[0] != size:
        factor = learning_rate_factor(blocks, size=size, new_size=best[0], rule=job.may_vary.learning_rate_rule)
    change = f"batches of {best[0]} samples in {best[1]} in place of {size} in {precision}"
    noise = "" if scale is None or best[0] == size else f"noise scale {scale:.3g}, learning rate x {factor:.3g}, "
    return VariantChoice(
        first_step=first_step,
        global_batch_size=best[0],
        precision=best[1],
        lr_factor=factor,
        num_steps=first_step + longest,
        steps=(steps[0], steps[1], steps[2]),
        gain=gain,
        noise_scale=scale,
        why=f"{job.name} trains on {change} from step {first_step}: {noise}{steps[0]} steps ({steps[1]} to {steps[2]}) "
        f"predicted in place of {left}, {gain:.2f} times sooner",
    )


def _whole(blocks: Sequence[NoiseBlock]) -> NoiseBlock:
    return NoiseBlock(signal=sum(block.signal for block in blocks), noise=sum(block.noise for block in blocks))


class TargetScheduler:
    """Chooses batch size and precision for the jobs of a batch that may vary them.

    jobs: these jobs, as they were written, with their steps resolved.
    variants: by job, the options of each variant, its own among them.
    notice: receives what was chosen, and why.
    """

    PURPOSE = "the choice of batch sizes"

    def __init__(
        self,
        journal: Journal,
        jobs: Mapping[str, Job],
        variants: Mapping[str, Mapping[Variant, Sequence[Profile]]],
        *,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._journal, self._jobs, self._variants, self._notice = journal, jobs, variants, notice
        fact = journal.get(FACT, {})
        self.choices = {name: from_json(VariantChoice, each) for name, each in fact.get("choices", {}).items()}
        self._noise: dict[str, dict[int, GradientNoise]] = {name: {} for name in jobs}
        for name, rows in fact.get("noise", {}).items():
            self._noise[name] = {row["step"]: from_json(GradientNoise, row) for row in rows}
        self._waiting: set[str] = set()  # jobs that rest until their choice is handed over
        self._ended = {name for name, record in journal.jobs().items() if record.status in ENDED}
        self._lock = threading.Lock()

    def details(self) -> dict[str, dict[str, Any]]:
        """Returns what the jobs' records must contain before an executor reads them, by job: the ends of probes."""
        records = self._journal.jobs()
        return {
            name: {GOAL: self._probe(name)}
            for name in self._jobs
            if name not in records or GOAL not in records[name].details
        }

    def attach(
        self,
        act: Callable[[SteeringRequest], None],
        *,
        later: Callable[[Callable[[], None]], None],
        started_s: float,
    ) -> None:
        """Sends requests to `act` from now on; first those of an earlier process, which may not have been received."""
        self._act, self._later = act, later
        for name in self._jobs.keys() - self._ended:
            record = self._journal.jobs().get(name)
            if name in self.choices or (record is not None and record.step >= self._probe(name)):
                self._choose_soon(name)

    def _choose_soon(self, name: str) -> None:
        self._waiting.add(name)
        self._later(lambda: self._choose(name))

    def is_open(self) -> bool:
        """Returns whether a job waits for its choice."""
        return bool(self._waiting)

    def listen(self, event: ExecutionEvent) -> None:
        """Handles an event of the executor."""
        if isinstance(event, JobEnded):
            self._ended.add(event.job)
        elif isinstance(event, GangReport) and isinstance(event.event, Steps):
            self._hear(event.job, event.event)
        elif isinstance(event, SegmentEnded) and (name := event.segment.job) in self._jobs:
            rests = event.outcome.result.get("step", 0) >= self._probe(name)
            if rests and name not in self.choices:
                self._choose_soon(name)

    def _probe(self, name: str) -> int:
        return probe_steps(self._jobs[name].total_steps)

    def _hear(self, name: str, steps: Steps) -> None:
        if name not in self._jobs or name in self.choices:
            return
        decided_after = int(DECIDED_AFTER * self._probe(name))
        with self._lock:
            self._noise[name] |= {each.step: each for each in steps.noise if each.step < decided_after}
            self._keep()
        # A gang that may train on is told so before it stops. One that is to change stops at the end of its probe.
        if steps.step >= decided_after and not self._choice(name).phases(self._jobs[name]):
            self._choose_soon(name)

    def _choice(self, name: str) -> VariantChoice:
        measured = [self._noise[name][step] for step in sorted(self._noise[name])]
        num_devices = self._journal.segments(name)[-1].what["num_devices"]
        step_s = {
            variant: seconds
            for variant, profiles in self._variants[name].items()
            if (seconds := _seconds(profiles, num_devices=num_devices)) is not None
        }
        return choose_variant(self._jobs[name], measured, first_step=self._probe(name), step_s=step_s)

    def _choose(self, name: str) -> None:
        self._waiting.discard(name)
        if name in self._ended:
            return
        if name not in self.choices:
            with self._lock:
                self.choices[name] = self._choice(name)
                self._keep()
            self._notice(self.choices[name].why)
        choice = self.choices[name]
        phases = choice.phases(self._jobs[name])
        self._act(
            SteeringRequest(
                goals={name: choice.num_steps},
                phases={name: phases} if phases else {},
                choices={name: choice.why},
            )
        )

    def _keep(self) -> None:
        noise = {name: to_json(list(rows.values())) for name, rows in self._noise.items() if name not in self.choices}
        self._journal.put(FACT, {"noise": noise, "choices": to_json(self.choices)})


def _seconds(profiles: Sequence[Profile], *, num_devices: int) -> float | None:
    """Returns the least seconds of a step on `num_devices` devices, or as many device-seconds on others."""
    alike = [profile.step_s for profile in profiles if profile.num_devices == num_devices]
    others = [profile.step_s * profile.num_devices / num_devices for profile in profiles]
    return min(alike or others, default=None)


def variant_jobs(job: Job) -> dict[Variant, Job]:
    """Returns the variants of a job other than its own, as jobs to be profiled."""
    return {
        (size, precision): replace(
            job, name=f"{job.name}.{size}.{precision}", global_batch_size=size, precision=precision
        )
        for size, precision in job.may_vary.choices(job)[1:]
    }
