"""Evaluates a job at a rung on a part of the held-out rows, and goes on with it until it is enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ringmaster.features.rung_evaluation.row_parts import (
    end_of,
    head_of,
    in_words,
    num_at_once,
    part_at,
    place_of,
    row_order,
)
from ringmaster.techniques.metric import metric_named
from ringmaster.techniques.processes.gang_events import EvaluationReported, PartialEvaluation, RowValues
from ringmaster.techniques.processes.order import TRAIN
from ringmaster.techniques.technique import Technique
from ringmaster.techniques.training.callbacks import JobContext, TrainerCallback

if TYPE_CHECKING:
    from ringmaster.techniques.processes.reporter import Reporter
    from ringmaster.techniques.training.bound_loss import BoundLoss


class PartCallback(TrainerCallback):
    """Has evaluations at rungs compute parts of the held-out rows, of which it reports the value of each row."""

    def __init__(self, context: JobContext) -> None:
        super().__init__(context)
        self._context = context
        self._part: PartialEvaluation | None = None  # what the last evaluation has computed; None for all rows
        self._rows_done = (-1, 0)  # a step, and how many rows were computed of its part
        self._last_share = 0.0  # up to which that part was commanded to go on

    @classmethod
    def is_for(cls, context: JobContext) -> bool:
        """Returns whether the job is evaluated on parts of the rows: finished models never are."""
        return bool(context.job.evaluation.parts) and context.order.purpose == TRAIN

    def evaluated_rows(self, loss: BoundLoss, num_rows: int) -> Sequence[int] | None:
        """Returns the rows of the part that is due, in its order.

        After the first rows of the order, they are a few of the part at a time: more may not be needed.
        """
        part = part_at(self._context.job.evaluation, self._context.next_step)
        if part is None or self._context.next_step >= self._context.job.total_steps or not self._gives_rows(loss):
            return None
        begin, end = self._places(num_rows)
        num_due = end - begin if begin == 0 else min(end - begin, num_at_once(begin))
        return row_order(num_rows, seed=part.seed)[begin : begin + num_due]

    def observe_rows(self, rows: RowValues | None, num_rows: int) -> None:
        """Keeps the values of the rows of an evaluation."""
        self._part = None
        if rows is not None:
            self._part = PartialEvaluation(begin=self._places(num_rows)[0], whole=num_rows, rows=rows)
            if self._rows_done[0] != self._context.next_step:
                self._last_share = 0.0
            self._rows_done = self._context.next_step, end_of(self._part)

    def change_report(self, report: EvaluationReported) -> EvaluationReported:
        """Adds the part to the report of its evaluation."""
        if (part := self._part) is None:
            return report
        note = in_words(part) if part.begin == 0 else ""  # further rows are no figure by themselves
        return replace(report, part=part, num_rows=len(part.rows.values), note=note)

    def evaluation_votes(self, reporter: Reporter, *, is_leaving: bool) -> tuple[float, ...]:
        """Returns whether the rows are enough, whether the job leaves its gang, and the share that was commanded."""
        if self._part is None:
            return ()
        head = head_of(self._context.job.name, step=self._context.next_step)
        shares = [float(share) for share in reporter.commanded(head)]
        share = max(shares, default=0.0) if self._context.ranks.rank == 0 else 0.0
        return float(0.0 in shares), float(is_leaving), share

    def continues_evaluation(self, sums: Sequence[float]) -> bool:
        """Returns whether further rows are to be evaluated now.

        A command to stop or to leave ends an evaluation of a part, as does one that no further rows are needed. Only
        after the latter is the job done: in the other cases its next gang computes what is left.
        """
        is_enough, num_leaving, share = sums
        assert self._part is not None, "it has voted"
        self._last_share = max(self._last_share, share)
        begin, end = self._places(self._part.whole)
        has_further = not is_enough and begin < end
        self.is_interrupted = has_further and num_leaving > 0
        return has_further and not self.is_interrupted

    def _gives_rows(self, loss: BoundLoss) -> bool:
        """Returns whether each row of the data has a value of the first metric, of which all have the mean."""
        technique = self._context.technique
        # A technique that divides sequences gives a rank some tokens of each row, and no whole rows.
        has_whole_rows = technique is None or type(technique).part is Technique.part
        return metric_named(self._context.job.evaluation.metrics[0]).is_mean and has_whole_rows and loss.separates_rows

    def _places(self, num_rows: int) -> tuple[int, int]:
        """Returns where what is left of the part begins and ends in the order of the rows."""
        part, (step, num_done) = part_at(self._context.job.evaluation, self._context.next_step), self._rows_done
        assert part is not None, "there is one at this step"
        if step != self._context.next_step:
            return place_of(part.begin, num_rows), place_of(part.end, num_rows)
        return num_done, place_of(max(part.end, self._last_share), num_rows)


TRAINER_CALLBACKS = (PartCallback,)
