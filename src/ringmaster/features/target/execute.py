"""The choices on the way to a target: a steering policy of the executor.

A job that may vary its learning rate waits for short runs of each rate, and continues from the checkpoint of the best.
One that may vary its batch size, its precision or its exchanges first trains a probe, a tenth of its steps, with its
own; the short run that it continues from is part of it. With the noise scale of the gradient that the probe has
measured, the planner compares for each permitted variant

    (predicted steps to the target) x (predicted seconds of a step under the options of the profile)

and takes the least, unless it gains less than `MIN_GAIN`. Local updates are considered only where exchanges are so
large a share of a step that leaving them out would gain as much. The job then stops at a checkpoint, and is planned
again with the options of the variant. A choice is a function of what was measured in the first nine tenths of the
probe, and is written to the journal before it is acted upon: after a kill, it is made again or repeated.
"""

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ringmaster.codec import from_json, to_json
from ringmaster.features.target.job import Target, exchanging, search_steps, variables_of
from ringmaster.features.target.noise_scale import (
    GradientNoise,
    NoiseBlock,
    learning_rate_factor,
    noise_blocks,
    probe_steps,
    ratio_interval,
    steps_ratio,
)
from ringmaster.tasks.execution.execution_events import ExecutionEvent, GangReport, JobEnded, SegmentEnded
from ringmaster.tasks.execution.job_table import variant_options
from ringmaster.tasks.execution.steering import FeaturePolicy, SteeredBatch, SteeringRequest
from ringmaster.tasks.storage.journal import ENDED
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.job import TrainingPhase, Variant
from ringmaster.techniques.job_features import FirstCheckpoint
from ringmaster.techniques.processes.gang_events import EvaluationReported, Event, Steps

FACT = "targets"  # a fact of the batch: {"noise": by job, "choices": by job, "rates": by job}
MIN_GAIN = 0.15
"""The least share of the remaining time that a change must be predicted to save."""
DECIDED_AFTER = 0.9
"""The share of a probe whose measurements decide, so that a job that keeps its batch size need not stop."""
SEARCH_FIRST = "a better learning rate may be worth as much as a better batch size: list some under may_vary.lr of {}"
MIN_MEASURED = 10  # steps with measurements, without which no batch size is changed


@dataclass(frozen=True, kw_only=True)
class VariantChoice:
    """What was chosen for the rest of a job, and why.

    phase: of the rest of the job. It is like the job's own where nothing changes.
    steps: the predicted steps of the rest, in place of those that the job has left, with the interval in which they are
        expected.
    gain: the factor by which the rest is predicted to be quicker.
    noise_scale: of the probe, in samples; None where it was not measured.
    why: in words.
    """

    phase: TrainingPhase
    steps: tuple[int, int, int]
    gain: float
    noise_scale: float | None
    why: str

    def phases(self, job: Job) -> tuple[TrainingPhase, ...]:
        """Returns the phases of the job with this choice; none where it changes nothing."""
        own = job.phase(0)
        return () if self.phase.variant == own.variant else (own, self.phase)


@dataclass(frozen=True, kw_only=True)
class LearningRateChoice:
    """The learning rate that was the best of short runs, and why, in words.

    goes_on_from: the short run from whose checkpoint the job continues; empty where it begins again.
    """

    lr: float
    why: str
    goes_on_from: str = ""


def choose_variant(
    job: Job,
    measured: Sequence[GradientNoise],
    *,
    first_step: int,
    step_s: Mapping[Variant, float],
    exchange_share: float = 0.0,
) -> VariantChoice:
    """Returns the variant in which the rest of a job is predicted to be the quickest.

    Of variants that differ in local updates alone and are within `MIN_GAIN` of the quickest, it is the one with the
    most exchanges: what workers lose by drifting apart is not predicted.

    Args:
        job: the job as it was written.
        measured: the noise of its gradients in the probe.
        first_step: the step from which it may change.
        step_s: the seconds of a step, for each variant that can be trained.
        exchange_share: of a step of the job as it was written, the share that exchanges take.
    """
    size, precision, _ = own = job.phase(0).variant
    left, blocks = job.total_steps - first_step, noise_blocks(measured)
    is_known = len(measured) >= MIN_MEASURED
    scale = _whole(blocks).scale if is_known else None

    def ratio(new_size: int) -> float:
        return 1.0 if new_size == size else steps_ratio(blocks, size=size, new_size=new_size)

    def time(variant: Variant) -> float:
        return ratio(variant[0]) * step_s[variant]

    offered = [
        variant
        for variant in variables_of(job).choices(job)
        if variant in step_s and (variant[0] == size or is_known)
        if variant[2] == 1 or exchange_share * (1 - 1 / variant[2]) >= MIN_GAIN
    ]
    best = min(offered, key=time, default=own)
    alike = [each for each in offered if each[:2] == best[:2] and (1 - MIN_GAIN) * time(each) <= time(best)]
    best = min(alike, key=lambda variant: variant[2], default=own)
    gain = time(own) / time(best) if own in step_s else 1.0
    exchanges = [f"exchanges are {exchange_share:.0%} of a step"] if len(variables_of(job).sync_every) > 1 else []
    where = f"{job.name} keeps batches of {size} samples in {precision}"
    if best == own or 1 - 1 / gain < MIN_GAIN:
        why = f"no other choice is predicted to save {MIN_GAIN:.0%} of the rest"
        if not is_known and len(variables_of(job).global_batch_size) > 1:
            why = "the noise scale was not measured, which takes single, ddp or fsdp"
        return VariantChoice(
            phase=replace(job.phase(0), first_step=first_step),
            steps=(left, left, left),
            gain=1.0,
            noise_scale=scale,
            why=", ".join([f"{where}: {why}", *exchanges]),
        )
    new_size, new_precision, sync_every = best
    low, high, factor = 1.0, 1.0, 1.0
    if new_size != size or sync_every > 1:
        low, high = ratio_interval(blocks or [NoiseBlock(signal=1.0, noise=0.0)], size=size, new_size=new_size)
    steps = tuple(-int(-left * each // 1) for each in (ratio(new_size), low, high))
    # A constant rate may train on for as long as the target may take. A schedule that decays must complete.
    longest = min(steps[2], left) if job.schedule.name == "constant" else steps[0]
    if new_size != size:
        factor = learning_rate_factor(blocks, size=size, new_size=new_size, rule=variables_of(job).learning_rate_rule)
    change = f"batches of {new_size} samples in {new_precision}"
    reasons = [f"noise scale {scale:.3g}, learning rate x {factor:.3g}"] if scale and new_size != size else []
    if sync_every > 1:
        change += f" with an exchange of {variables_of(job).workers or 1} workers every {sync_every} steps"
        reasons += exchanges
    predicted = f"{steps[0]} steps ({steps[1]} to {steps[2]}) predicted in place of {left}, {gain:.2f} times sooner"
    return VariantChoice(
        phase=TrainingPhase(
            first_step=first_step,
            global_batch_size=new_size,
            precision=new_precision,
            lr_factor=factor,
            num_steps=first_step + longest,
            features=exchanging(sync_every, workers=variables_of(job).workers, warmup_steps=first_step),
        ),
        steps=(steps[0], steps[1], steps[2]),
        gain=gain,
        noise_scale=scale,
        why=f"{job.name} trains on {change} in place of {size} in {precision} from step {first_step}: "
        f"{', '.join([*reasons, predicted])}",
    )


def _whole(blocks: Sequence[NoiseBlock]) -> NoiseBlock:
    return NoiseBlock(signal=sum(block.signal for block in blocks), noise=sum(block.noise for block in blocks))


def choose_learning_rate(job: Job, results: Mapping[float, Mapping[str, float]]) -> LearningRateChoice:
    """Returns the learning rate with the best value of the target's metric; the job's own where none is better.

    results: by learning rate, the metrics after the short run; none of a run that has failed.
    """
    target = job.feature(Target)
    assert target is not None
    metric, sign, own = target.metric, 1 if target.at_most is None else -1, job.optimizer.lr
    values = {lr: results.get(lr, {}).get(metric, math.nan) for lr in variables_of(job).lr}
    scores = {lr: sign * value if math.isfinite(value) else -math.inf for lr, value in values.items()}
    best = max(scores, key=lambda lr: (scores[lr], lr == own))
    listed = ", ".join(f"{value:.4g} with {lr:g}" for lr, value in values.items())
    verb = "keeps" if best == own else f"takes, in place of {own:g},"
    why = f"{job.name} {verb} the learning rate {best:g}: {metric} after {search_steps(job)} steps is {listed}"
    return LearningRateChoice(lr=best, why=why)


class TargetScheduler(FeaturePolicy):
    """Chooses for the jobs of a batch what they may vary; the jobs that try learning rates are among them."""

    PURPOSE = "the choices on the way to targets"

    def __init__(self, batch: SteeredBatch) -> None:
        super().__init__(batch)
        self.jobs = {job.name: job for job in batch.jobs if self.is_for(job)}
        self._variants = {job.name: variant_options(job, batch.profiles) for job in self.jobs.values() if job.varies}
        fact = self._journal.get(FACT, {})
        self.choices = {name: from_json(VariantChoice, each) for name, each in fact.get("choices", {}).items()}
        self.rates = {name: from_json(LearningRateChoice, each) for name, each in fact.get("rates", {}).items()}
        self._searches = {name: {each.name: each for each in job.searches()} for name, job in self.jobs.items()}
        # The job for which each job trains.
        self._owners = {name: name for name in self.jobs}
        self._owners |= {search: name for name, searches in self._searches.items() for search in searches}
        self._noise: dict[str, dict[int, GradientNoise]] = {name: {} for name in self._owners}
        for name, rows in fact.get("noise", {}).items():
            self._noise[name] = {row["step"]: from_json(GradientNoise, row) for row in rows}
        self._waiting: set[str] = set()  # jobs that rest until their choice is handed over
        self._ended = {name for name, record in self._journal.jobs().items() if record.status in ENDED}
        self._heard_out: set[str] = set()  # short runs of which all events were received
        self._lock = threading.Lock()
        if without := [name for name, job in self.jobs.items() if not job.searches()]:
            batch.notice(SEARCH_FIRST.format(", ".join(without)))

    @classmethod
    def is_for(cls, job: Job) -> bool:
        """Returns whether something of a job is still to be chosen."""
        return job.varies or bool(job.searches())

    @classmethod
    def goals(cls, jobs: Iterable[Job]) -> Mapping[str, int]:
        """Returns the ends of probes and of short runs; 0 for a job that waits for its short runs."""
        goals = dict[str, int]()
        for job in filter(cls.is_for, jobs):
            searches = job.searches()
            goals |= dict.fromkeys((each.name for each in searches), search_steps(job))
            goals[job.name] = 0 if searches else _probe(job)
        return goals

    def attach(
        self,
        act: Callable[[SteeringRequest], None],
        *,
        later: Callable[[Callable[[], None]], None],
        elapsed_s: float,
    ) -> None:
        """Sends requests to `act` from now on; first those of an earlier process, which may not have been received."""
        self._act, self._later = act, later
        for name, job in self.jobs.items():
            record = self._journal.jobs().get(name)
            if self._searches[name]:
                self._later(partial(self._compare, name))
            is_probed = job.varies and record is not None and record.step >= _probe(job)
            if name in self.choices or (is_probed and not self._batch.is_replayed):
                self._choose_soon(name)

    def _choose_soon(self, name: str) -> None:
        self._waiting.add(name)
        self._later(partial(self._choose, name))

    def is_open(self) -> bool:
        """Returns whether a job waits for a choice."""
        return bool(self._waiting) or any(
            searches and name not in self.rates and name not in self._ended for name, searches in self._searches.items()
        )

    def listen(self, event: ExecutionEvent) -> None:
        """Handles an event of the executor."""
        if isinstance(event, JobEnded):
            self._ended.add(event.job)
            self._heard_out.add(event.job)
        elif isinstance(event, GangReport) and event.job in self._owners:
            self._handle_gang_event(event.job, event.event)
        elif isinstance(event, SegmentEnded) and (name := event.segment.job) in self._owners:
            step = event.outcome.result.step or 0
            if name in self._variants and step >= _probe(self.jobs[name]) and name not in self.choices:
                self._choose_soon(name)
            elif step >= search_steps(self.jobs[self._owners[name]]):
                self._heard_out.add(name)
        if isinstance(event, (SegmentEnded, JobEnded)):  # whichever job it was: those of a group have one segment
            for name in self.jobs:
                if self._searches[name] and name not in self.rates:
                    self._later(partial(self._compare, name))

    def _compare(self, name: str) -> None:
        """Chooses a job's learning rate once all of its short runs have ended, and lets it train."""
        job, searches, records = self.jobs[name], self._searches[name], self._journal.jobs()
        left = [other for other in searches if records[other].status not in ENDED]
        if name in self._ended:
            self._act(SteeringRequest(stops=dict.fromkeys(left, f"stopped early: {name} has ended")))
            return
        if name not in self.rates:
            results = {}
            for other, search in searches.items():
                record = records[other]
                is_over = other not in left or record.rested == search_steps(job)
                if not is_over or (self._batch.is_replayed and other not in self._heard_out):
                    return
                results[search.optimizer.lr] = record.evaluated.metrics if record.evaluated is not None else {}
            choice = choose_learning_rate(job, results)
            best = next(other for other, search in searches.items() if search.optimizer.lr == choice.lr)
            if records[best].rested == search_steps(job) and self._has_measured(name, best):
                why = f"{choice.why}. It continues from step {search_steps(job)} of {best}"
                choice = replace(choice, goes_on_from=best, why=why)
            with self._lock:
                self.rates[name] = choice
                self._keep()
            self._batch.notice(choice.why)
        choice = self.rates[name]
        settled, is_probed = replace(job, optimizer=replace(job.optimizer, lr=choice.lr)), False
        if choice.goes_on_from:
            root = self._batch.paths.checkpoint_dir(searches[choice.goes_on_from])
            settled = settled.with_start(FirstCheckpoint(checkpoints=root, step=search_steps(job)))
            is_probed = search_steps(job) >= _probe(job)
        self._act(
            SteeringRequest(
                jobs={} if settled == job else {name: settled},
                likes={} if settled == job else {name: name},
                goals={} if is_probed else {name: _probe(job)},
                stops=dict.fromkeys(left, f"stopped early: {choice.why}"),
                choices={} if name in self.choices else {name: choice.why},
            )
        )
        if is_probed:
            self._choose_soon(name)

    def _has_measured(self, name: str, search: str) -> bool:
        """Returns whether a short run has measured what the choices after it take."""
        is_needed = name in self._variants and len(variables_of(self.jobs[name]).global_batch_size) > 1
        return not is_needed or len(self._noise[search]) >= MIN_MEASURED

    def _handle_gang_event(self, source: str, event: Event) -> None:
        """Handles an event of a gang that trains a job or one of its short runs."""
        name = self._owners[source]
        if isinstance(event, EvaluationReported) and event.step >= search_steps(self.jobs[name]):
            self._heard_out.add(source)
        if not isinstance(event, Steps) or name not in self._variants or name in self.choices:
            return
        decided_after = int(DECIDED_AFTER * _probe(self.jobs[name]))
        with self._lock:
            noise = [from_json(GradientNoise, each) for each in event.measurements]
            self._noise[source] |= {each.step: each for each in noise if each.step < decided_after}
            self._keep()
        # A gang that may continue to train is notified before it stops. One that is to change stops at the end of its
        # probe.
        if source == name and event.step >= decided_after and not self._choice(name).phases(self.jobs[name]):
            self._choose_soon(name)

    def _choice(self, name: str) -> VariantChoice:
        before = self.rates[name].goes_on_from if name in self.rates else ""
        noise, variants = self._noise.get(before, {}) | self._noise[name], self._variants[name]
        # As many devices as the job has had, or its equal share of all of them if that is more.
        num_left = sum(record.status not in ENDED for record in self._journal.jobs().values())
        share = max((each.num_devices for profiles in variants.values() for each in profiles), default=1) // max(
            num_left, 1
        )
        segments = self._journal.segments(name) or self._journal.segments(before)
        most = max(segments[-1].spec.num_devices if segments else 1, share)
        step_s = {
            variant: seconds
            for variant, profiles in variants.items()
            if (seconds := min((each.step_s for each in profiles if each.num_devices <= most), default=None))
            is not None
        }
        return choose_variant(
            self.jobs[name],
            [noise[step] for step in sorted(noise)],
            first_step=_probe(self.jobs[name]),
            step_s=step_s,
            exchange_share=exchange_share(variants, own=self.jobs[name].phase(0).variant),
        )

    def _choose(self, name: str) -> None:
        self._waiting.discard(name)
        if name in self._ended:
            return
        if name not in self.choices:
            with self._lock:
                self.choices[name] = self._choice(name)
                self._keep()
            self._batch.notice(self.choices[name].why)
        choice = self.choices[name]
        phases = choice.phases(self.jobs[name])
        whys = [each.why for each in (self.rates.get(name), choice) if each is not None]
        self._act(
            SteeringRequest(
                goals={name: choice.phase.num_steps},
                phases={name: phases} if phases else {},
                choices={name: "; ".join(whys)},
            )
        )

    def _keep(self) -> None:
        noise = {
            name: to_json(list(rows.values()))
            for name, rows in self._noise.items()
            if rows and self._owners[name] not in self.choices
        }
        self._journal.put(FACT, {"noise": noise, "choices": to_json(self.choices), "rates": to_json(self.rates)})


def _probe(job: Job) -> int:
    """Returns the steps that a job trains with its own values before anything changes."""
    return probe_steps(job.total_steps) if job.varies else job.total_steps


def exchange_share(variants: Mapping[Variant, Sequence[Profile]], *, own: Variant) -> float:
    """Returns the share of a step that the exchanges between devices take, by its seconds t(H) with one every H steps.

    With t(H) = c + s / H it is s / t(1) = (1 - t(H) / t(1)) / (1 - 1 / H), for the largest gang and the largest H for
    which there are options; 0 where there are none.
    """
    at_once = {each.num_devices: each.step_s for each in sorted(variants.get(own, ()), key=lambda each: -each.step_s)}
    shares = [
        (each.num_devices, variant[2], (1 - each.step_s / at_once[each.num_devices]) / (1 - 1 / variant[2]))
        for variant, profiles in variants.items()
        for each in profiles
        if variant[:2] == own[:2] and variant[2] > 1 and each.num_devices > 1 and each.num_devices in at_once
    ]
    return min(max(max(shares, default=(0, 0, 0.0))[2], 0.0), 1.0)


STEERING = (TargetScheduler,)
