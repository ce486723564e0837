"""A member's way through a segment: what is told of it and kept of it, from its first step to its end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ringmaster.techniques.engine.fused.member import Member
from ringmaster.techniques.engine.ranks import Ranks
from ringmaster.techniques.engine.reporter import Reporter
from ringmaster.techniques.engine.saving import Asks, Saver
from ringmaster.techniques.engine.trainer import StepReport
from ringmaster.techniques.engine.training import Progress, evaluation_due, tell_passed_over


class Seat:
    """The place of a member in a gang. `last_step` may move while it trains."""

    def __init__(self, member: Member, ranks: Ranks, reporter: Reporter) -> None:
        self.member, self.first_step, self.last_step = member, member.next_step, member.order.last_step
        self._teller = reporter.about(member.name)
        self._progress = Progress(self._teller)
        self._saver = Saver(member, member.store(), self._teller, ranks=ranks)
        self._saved_s, self._saved_step = time.monotonic(), member.next_step
        self._seconds: dict[str, float] = {}
        self._metrics: Mapping[str, float] | None = None

    @property
    def name(self) -> str:
        """The job's."""
        return self.member.name

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to train in this segment."""
        return self.member.next_step >= self.last_step

    @property
    def is_at_its_end(self) -> bool:
        """Whether nothing is left to train in any segment."""
        return self.member.next_step == self.member.job.total_steps

    @property
    def wants_metrics(self) -> bool:
        """Whether it is to be evaluated after this step, which is not its job's last."""
        return self.member.next_step > 0 and evaluation_due(self.member.order, self.member.next_step)

    def go_on(self, num_steps: int) -> None:
        """Lets it train so many steps more than was ordered, up to its job's last."""
        job, ordered = self.member.job, self.member.order.last_step
        self.last_step = max(self.last_step, min(job.total_steps, ordered + num_steps))

    # -- what is told --------------------------------------------------------------------------------------------------

    def ready(self, *, startup_s: float) -> None:
        """It is about to take its first step."""
        self._seconds["startup_s"] = startup_s
        self._teller.send("ready", step=self.first_step, startup_s=startup_s)
        tell_passed_over(self.member.passed_over, self._teller, step=self.first_step)

    def stepped(self, *, step: int, loss: float, seconds: float) -> None:
        """It has taken a step, in so many seconds of the gang's."""
        self._progress.add(StepReport(step=step, loss=loss, seconds=seconds, asked=()))

    def measured(self, metrics: Mapping[str, float], *, seconds: float) -> None:
        """It was evaluated, in `seconds`, which are its share of those of all that were."""
        if self.is_at_its_end:
            self._metrics, self._seconds["evaluate_s"] = metrics, seconds
        else:
            self._progress.flush()
            self._teller.send("metrics", step=self.member.next_step, metrics=metrics)

    # -- what is kept --------------------------------------------------------------------------------------------------

    def asks(self) -> tuple[float, ...]:
        """What this rank says of its saves, to be summed over the ranks, all of which have one under way or none."""
        every_s = self.member.order.checkpoint_every_s
        is_due = every_s is not None and time.monotonic() - self._saved_s >= every_s
        return (float(is_due),) if self._saver.is_idle else (float(is_due), *self._saver.asks())

    def follow(self, sums: Sequence[float]) -> bool:
        """Takes the ranks' asks, so that a save under way gets on; returns whether another is to begin."""
        is_due, *asks = sums
        if asks:
            self._saver.follow(Asks(*asks))
        return is_due > 0 and self._saver.is_idle

    def begin_save(self) -> None:
        """Copies its state; it is written while training goes on. Where that fails it is told, and tried again."""
        self._saved_s = time.monotonic()
        self._saver.begin()

    def begin_last_save(self) -> None:
        """Has what is not kept yet written, as it is: it trains no further before `save`, which waits for that."""
        if self.member.next_step > self._saved_step:
            self._saved_s, self._saved_step = time.monotonic(), self.member.next_step
            self._saver.begin_last()

    def save(self) -> None:
        """Keeps what it has learnt. Raises CheckpointError."""
        self.begin_last_save()
        self._saver.finish()
        if self._saved_step > self.first_step:
            self._seconds.setdefault("save_s", time.monotonic() - self._saved_s)

    def export(self) -> None:
        """Writes its finished model."""
        started_s = time.perf_counter()
        self.member.export()
        self._seconds["evaluate_s"] += time.perf_counter() - started_s

    def end(self, status: str, *, message: str = "") -> dict[str, Any]:
        """How it ended, as `ringmaster.techniques.engine.training.train` says it; nothing more is told of its steps."""
        self._saver.finish()
        self._progress.flush()
        outcome: dict[str, Any] = {"status": status, "first_step": self.first_step, "step": self.member.next_step}
        outcome |= self._seconds
        if status == "done" and self._metrics is not None:
            outcome["metrics"] = dict(self._metrics)
        return {**outcome, "message": message} if message else outcome
