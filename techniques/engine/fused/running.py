"""The loop of a group's segment: each job from its newest checkpoint to its own last step, all in one gang.

To whoever supervises it a group is its leader, the job of the order. The fellows are told of by name, and end one by
one; what one of them does wrong is its own affair: it leaves, and the others do not notice. When the leader ends early
all others are checkpointed, so that they can go on without it.

Where no more than some may be trained at once, the leader and the first of its fellows begin. The others wait, and one
joins between two steps when another has left, in the order in which they stand in the order.

Several ranks do the same at the same steps, by sums of what each was told. A loss that is no number is one job's affair
there too, as all see it; any other error may befall one rank alone, and ends the gang.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

from ringmaster.techniques.engine.checkpoint import CheckpointStore
from ringmaster.techniques.engine.failures import failure_kind
from ringmaster.techniques.engine.fused.group import Group, MemberReport
from ringmaster.techniques.engine.fused.member import Member
from ringmaster.techniques.engine.fused.opening import join_group, open_group, orders_of
from ringmaster.techniques.engine.fused.seat import Seat
from ringmaster.techniques.engine.order import GangOrder
from ringmaster.techniques.engine.reporter import STOP, Reporter
from ringmaster.techniques.engine.training import BUILD_PATIENCE_S, SAVE_PATIENCE_S, Patience, lost_loss
from ringmaster.techniques.turns import AT_ONCE

T = TypeVar("T")

NOTHING = "the batch of step {step} has no label to learn from. To fix: leave such samples out"

DONE, PREEMPTED, LEFT, INVALID = "done", "preempted", "left", "invalid"


def run(order: GangOrder, reporter: Reporter, *, rank: int = 0) -> dict[str, Any]:
    """Trains the order's job and its fellows. Returns the leader's result, with those of the others as `fellows`.

    Raises what comes of no single fellow: where the base cannot be made, memory runs out, a device fails.
    """
    segment = _Segment(order, reporter, rank=rank)
    segment.train()
    return segment.result()


class _Segment:
    """The jobs of a gang on their way, and what has become of those that are through."""

    def __init__(self, order: GangOrder, reporter: Reporter, *, rank: int) -> None:
        self._order, self._reporter = order, reporter
        self._ranks = join_group(order, rank)
        reporter.phase("building the model", patience_s=BUILD_PATIENCE_S)
        self._group = open_group(order, self._ranks)
        self._waiting = orders_of(order)
        self._at_once = order.config.get(AT_ONCE) or len(self._waiting)
        self._seats: dict[str, Seat] = {}
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._until = 0  # up to where the leader was told to go on

    def train(self) -> None:
        """All of them, step by step, until none is left."""
        self._fill(since_s=self._order.ordered_at_s)
        patience = Patience(self._reporter)
        while self._seats:
            patience.learn(self._step())
            did_more = self._follow()
            if self._fill(since_s=time.monotonic()) or did_more:
                patience.announce()
        self._ranks.agree(True)  # nobody leaves while a peer may still wait for it

    def result(self) -> dict[str, Any]:
        """The leader's, and those of its fellows by name."""
        outcomes = dict(self._outcomes)
        return {**outcomes.pop(self._order.job.name), "fellows": outcomes}

    @property
    def _is_dissolved(self) -> bool:
        """Whether the leader ended early."""
        leader = self._outcomes.get(self._order.job.name)
        return leader is not None and leader["status"] != DONE

    @property
    def _in_line(self) -> list[str]:
        """The jobs that wait for a seat, in their order."""
        return [order.job.name for order in self._waiting]

    # -- a step --------------------------------------------------------------------------------------------------------

    def _step(self) -> float:
        """One step of all; returns its seconds."""
        started_s = time.perf_counter()
        reports = self._all_or_each(list(self._seats.values()), self._stepped)
        seconds = time.perf_counter() - started_s
        for name, report in reports.items():
            if math.isfinite(report.loss):
                self._seats[name].stepped(step=report.step, loss=report.loss, seconds=seconds)
            else:
                lost = lost_loss(report.loss, step=report.step) if report.count else NOTHING.format(step=report.step)
                self._end(self._seats[name], INVALID, message=lost)
        self._reporter.beat()
        return seconds

    def _stepped(self, seats: Sequence[Seat]) -> dict[str, MemberReport]:
        if len(seats) == len(self._group.members):
            return self._group.step()
        few = Group(self._group.stem)
        for seat in seats:
            few.join(seat.member)
        return few.step()

    def _evaluated(self, seats: Sequence[Seat]) -> dict[str, dict[str, float]]:
        return self._group.evaluate([seat.member for seat in seats], beat=self._reporter.beat)

    def _all_or_each(self, seats: Sequence[Seat], act: Callable[[Sequence[Seat]], dict[str, T]]) -> dict[str, T]:
        """What `act` gives for all at once; where it fails, for each by itself: whose fault it is fails again."""
        try:
            return act(seats)
        except Exception as error:  # a user's data or loss may raise anything: the others can go on
            if self._ranks.num_ranks > 1 or failure_kind(error) == "out_of_memory":
                raise
            traceback.print_exception(error)
        found: dict[str, T] = {}
        for seat in seats:
            seat.member.drop_gradients()  # of a backward that came to no end
            self._try(seat, lambda seat=seat: found.update(act([seat])))  # type: ignore[misc]
            self._reporter.beat()
        return found

    def _follow(self) -> bool:
        """What follows from a step and from what the gang was told; returns whether it did anything but train."""
        is_over, self._until, leaving, due = self._asked()
        self._prolong(self._seats.values())
        is_over = is_over or self._is_dissolved
        if is_over:
            self._dismiss(self._in_line, PREEMPTED)
        else:
            self._dismiss(leaving, LEFT)
        on_the_way = [seat for seat in self._seats.values() if not seat.is_done]
        ending = [seat for seat in on_the_way if is_over or seat.name in leaving]
        saving = [seat for seat in on_the_way if seat not in ending and seat.name in due]
        if ending or saving:
            self._reporter.phase("saving", patience_s=SAVE_PATIENCE_S)
        for seat in saving:
            seat.begin_save()
        for seat in self._saved(ending):
            self._end(seat, PREEMPTED if is_over else LEFT)
        settled = self._settle([seat for seat in self._seats.values() if seat.is_done or seat.wants_metrics])
        return bool(ending or saving or settled)

    def _asked(self) -> tuple[bool, int, set[str], set[str]]:
        """Whether to stop, how far the leader is to go, who is to leave and whose save is due: equal on every rank.

        The ranks' asks are summed: what one was told, all were. The first rank alone says how far.
        """
        told, seats = self._reporter.told_to_leave(), list(self._seats.values())
        waiting = self._in_line
        is_over = self._reporter.told(STOP) or self._order.job.name in told
        asks = [(float(seat.name in told), *seat.asks()) for seat in seats]
        until = float(self._reporter.told_until()) if self._ranks.rank == 0 else 0.0
        never_begun = [float(name in told) for name in waiting]
        sums = iter(self._ranks.sum([float(is_over), until, *never_begun, *chain.from_iterable(asks)]))
        is_over, until = next(sums) > 0, next(sums)
        leaving, due = {name for name in waiting if next(sums) > 0}, set[str]()
        for seat, said in zip(seats, asks, strict=True):
            leaves, *saves = islice(sums, len(said))
            if leaves:
                leaving.add(seat.name)
            if seat.follow(saves):
                due.add(seat.name)
        return is_over, int(until), leaving, due

    def _settle(self, seats: Sequence[Seat]) -> bool:
        """Evaluates all of `seats` that are to be, at once, and lets go of those that are done."""
        if not seats:
            return False
        self._reporter.phase("saving", patience_s=SAVE_PATIENCE_S)
        kept = [seat for seat in seats if not seat.is_done] + self._saved([seat for seat in seats if seat.is_done])
        if measured := [seat for seat in kept if seat.is_at_its_end or seat.wants_metrics]:
            self._reporter.phase("evaluating", patience_s=SAVE_PATIENCE_S)
            started_s = time.perf_counter()
            metrics = self._all_or_each(measured, self._evaluated)
            seconds = (time.perf_counter() - started_s) / len(measured)
            for name, found in metrics.items():
                self._seats[name].measured(found, seconds=seconds)
        for seat in [seat for seat in self._seats.values() if seat.is_done]:
            if not seat.is_at_its_end or self._try(seat, seat.export):
                self._end(seat, DONE)
            self._reporter.beat()
        return True

    def _saved(self, seats: Sequence[Seat]) -> list[Seat]:
        """Those whose last checkpoint could be written; all are written at the same time."""
        for seat in seats:
            seat.begin_last_save()
        return [seat for seat in seats if self._try(seat, seat.save)]

    # -- how jobs come and go ------------------------------------------------------------------------------------------

    def _fill(self, *, since_s: float) -> bool:
        """Those whose turn it is take the seats that are free; returns whether any did. since_s: from when they start.

        Also those with nothing to train: the base takes their adapters, so that they can be measured.
        """
        has_any = False
        while self._waiting and not self._is_dissolved and len(self._seats) < self._at_once:
            self._reporter.phase("restoring", patience_s=SAVE_PATIENCE_S)
            new = self._admitted()
            startup_s = time.monotonic() - since_s
            for seat in new:
                self._group.join(seat.member)
                seat.ready(startup_s=startup_s)
            self._prolong(new)
            self._settle([seat for seat in new if seat.is_done])
            has_any, since_s = True, time.monotonic()
        if self._is_dissolved:
            self._dismiss(self._in_line, PREEMPTED)
        return has_any

    def _admitted(self) -> list[Seat]:
        """As many of those that wait as there is room for, each with what its newest checkpoint says."""
        known = set(self._seats)
        while self._waiting and not self._is_dissolved and len(self._seats) < self._at_once:
            self._admit(self._waiting.pop(0))
            self._reporter.beat()
        return [seat for name, seat in self._seats.items() if name not in known]

    def _dismiss(self, jobs: Collection[str], status: str) -> None:
        """Those of `jobs` that wait do so no longer."""
        gone = [order for order in self._waiting if order.job.name in jobs]
        self._waiting = [order for order in self._waiting if order.job.name not in jobs]
        for order in gone:
            self._close(order.job.name, {"status": status, "step": _steps_done(order)})

    def _prolong(self, seats: Iterable[Seat]) -> None:
        """Lets them go on for as long as the leader was told to."""
        for seat in seats:
            if self._until > self._order.last_step:
                seat.go_on(self._until - self._order.last_step)

    def _admit(self, order: GangOrder) -> None:
        try:
            member = Member(order, self._group.stem.model, device=self._ranks.device, ranks=self._ranks)
            member.restore()
        except Exception as error:  # noqa: BLE001 - a user's data may raise anything: the others can go on
            status, message = self._verdict(order.job.name, error)
            self._close(order.job.name, {"status": status, "step": _steps_done(order), "message": message})
        else:
            self._seats[order.job.name] = Seat(member, self._ranks, self._reporter)

    def _try(self, seat: Seat, action: Callable[[], None]) -> bool:
        """Whether it could be done; a job for which it could not leaves, with what it has learnt."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - as above
            status, message = self._verdict(seat.name, error)
            if action == seat.save:
                status = INVALID
            if status == INVALID or self._try(seat, seat.save):
                self._end(seat, status, message=message)
            return False
        return True

    def _verdict(self, job: str, error: Exception) -> tuple[str, str]:
        """The status of a job that an error befell, and what to say of it; raises what is not the job's alone."""
        kind = failure_kind(error)
        if kind == "out_of_memory" or self._ranks.num_ranks > 1 or (kind != INVALID and job == self._order.job.name):
            raise error
        traceback.print_exception(error)
        # What another try may mend befalls a job that is trained by itself as well, and is dealt with there.
        return INVALID if kind == INVALID else PREEMPTED, f"{type(error).__name__}: {error}"

    def _end(self, seat: Seat, status: str, *, message: str = "") -> None:
        del self._seats[seat.name]
        self._group.leave(seat.member)
        is_leader = seat.name == self._order.job.name
        status = PREEMPTED if is_leader and status == LEFT else status
        self._close(seat.name, seat.end(status, message=message))

    def _close(self, job: str, outcome: dict[str, Any]) -> None:
        self._outcomes[job] = outcome
        if job != self._order.job.name and outcome["status"] != PREEMPTED:
            self._reporter.about(job).send("ended", outcome=outcome)


def _steps_done(order: GangOrder) -> int:
    """Of a job that could not be made."""
    checkpoint = CheckpointStore(order.checkpoint_dir).newest() if order.checkpoint_dir is not None else None
    return checkpoint.manifest.step if checkpoint is not None else 0
