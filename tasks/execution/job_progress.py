"""The progress of a running job as its gang reports it, in figures for users."""

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ringmaster.tasks.planning.durations import seconds_text
from ringmaster.techniques.processes.gang_events import (
    EvaluationReported,
    Event,
    JobEvent,
    JobReady,
    PhaseStarted,
    Steps,
)

MAX_REPORTS = 50  # the newest reports, over which rates for users are measured
STARTING, TRAINING = "starting", "training"  # the phase before any report, and that in which steps are taken


def is_about(event: Event, job: str) -> bool:
    """Whether a gang's event concerns `job`.

    Events about other jobs that the gang trains carry those jobs' names within the batch.
    """
    named = event.job if isinstance(event, JobEvent) else None
    return named is None or named == job.rpartition("/")[2]


def reported_step(event: Event) -> int | None:
    """Returns the step that a job has reached according to an event, None if the event does not contain it."""
    return event.step if isinstance(event, (JobReady, Steps)) else None


@dataclass(frozen=True, kw_only=True)
class JobFigures:
    """What a running job does, in figures for users. None where a figure is unknown.

    phase: what its gang does other than to train, such as "saving"; empty while it trains.
    loss: of its newest step.
    metrics: of its newest evaluation.
    samples_per_s, tokens_per_s: over its newest steps, on all devices; tokens without padding.
    peak_bytes: the most memory that its first device has held so far.
    predicted_bytes: what a device was predicted to need.
    """

    phase: str = ""
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    predicted_bytes: int | None = None

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The texts of loss, samples/s, tokens/s and memory for a table; empty where unknown."""
        loss = "" if self.loss is None else f"{self.loss:.4g}"
        return loss, _rate(self.samples_per_s), _rate(self.tokens_per_s), memory_text(self)

    def in_words(self) -> str:
        """Returns the known figures: "loss 2.12, 512 samples/s, 65.5k tokens/s, memory 1.2 of 1.4 GiB predicted"."""
        loss, samples, tokens, memory = self.cells
        predicted = " predicted" if self.peak_bytes and self.predicted_bytes else ""
        texts = (
            loss and f"loss {loss}",
            samples and f"{samples} samples/s",
            tokens and f"{tokens} tokens/s",
            memory and f"memory {memory}{predicted}",
        )
        return ", ".join(filter(None, texts))


@dataclass
class JobProgress:
    """What the gang of a running job reports of it, to be shown.

    phase: as its gang called it. phase_s: when it began, on the clock of whoever calls `handle_event`.
    step_s: median seconds of a step of its newest report.
    predicted_bytes: the memory that a device was predicted to need.
    """

    step: int = 0
    step_s: float | None = None
    phase: str = STARTING
    phase_s: float = 0.0
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    predicted_bytes: int | None = None
    _reports: deque[Steps] = field(default_factory=lambda: deque(maxlen=MAX_REPORTS))
    _is_warm: bool = False

    def handle_event(self, event: Event, *, now_s: float = 0.0) -> None:
        """Takes in an event."""
        self.step = max(self.step, reported_step(event) or 0)
        phase = event.phase if isinstance(event, PhaseStarted) else self.phase
        if isinstance(event, JobReady) or (isinstance(event, Steps) and event.seconds and phase == STARTING):
            phase = TRAINING  # by `Steps`, where the reports before were not heard
        if phase != self.phase:
            self.phase, self.phase_s = phase, now_s
        if isinstance(event, Steps) and event.seconds:
            self._take_steps(event)
        elif isinstance(event, EvaluationReported) and event.part is None:
            self.metrics = event.metrics

    def _take_steps(self, report: Steps) -> None:
        self.step_s = statistics.median(report.seconds)
        self.loss = report.losses[-1] if report.losses else self.loss
        self.peak_bytes = max(self.peak_bytes or 0, report.peak_bytes) or None
        if self._reports and not self._is_warm:  # the first report includes the first step, which is slow
            self._reports.clear()
            self._is_warm = True
        self._reports.append(report)

    def figures(self) -> JobFigures:
        """Returns the present figures."""
        reports = list(self._reports)  # another thread may add one
        seconds = sum(sum(report.seconds) for report in reports)

        def rate(numbers: list[int]) -> float | None:
            return sum(numbers) / seconds if seconds and any(numbers) else None

        return JobFigures(
            phase="" if self.phase == TRAINING else self.phase,
            loss=self.loss,
            metrics=self.metrics,
            samples_per_s=rate([report.num_samples for report in reports]),
            tokens_per_s=rate([report.num_tokens for report in reports]),
            peak_bytes=self.peak_bytes,
            predicted_bytes=self.predicted_bytes,
        )

    def left_s(self, num_steps: int | None) -> float | None:
        """Returns the seconds of the steps that are left of `num_steps` at its present speed; None if unknown."""
        if self.step_s is None or num_steps is None:
            return None
        return max(0, num_steps - self.step) * self.step_s


def memory_text(figures: JobFigures) -> str:
    """Returns the memory that was held so far, of the predicted one: "1.2 of 1.4 GiB"; empty before the first step."""
    if not figures.peak_bytes:
        return ""
    known = [number for number in (figures.peak_bytes, figures.predicted_bytes) if number]
    unit, factor = ("GiB", 2**30) if max(known) >= 999 * 2**20 else ("MiB", 2**20)
    return f"{' of '.join(f'{number / factor:.3g}' for number in known)} {unit}"


def _rate(value: float | None) -> str:
    """Returns a rate of three digits: "0.25", "512", "65.5k", "1.2M"."""
    if value is None:
        return ""
    factor, unit = next(((f, u) for f, u in ((1e6, "M"), (1e3, "k")) if value >= 0.9995 * f), (1.0, ""))
    return f"{value / factor:.3g}{unit}"


def range_text(low_s: float, high_s: float) -> str:
    """Returns a range of times to come: "3 to 5 min", "at most 4 s"."""
    low, high = (seconds_text(float(round(max(0.0, seconds))), like=max(0.0, high_s)) for seconds in (low_s, high_s))
    if low_s < 0.5:
        return f"at most {high}"
    return high if low == high else f"{low.rpartition(' ')[0]} to {high}"


def whole_seconds(seconds: float) -> str:
    """Returns a time that changes while one looks, without fractions of a second: "12 s", "5.1 min"."""
    return seconds_text(float(round(max(0.0, seconds))))
