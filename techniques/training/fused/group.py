"""The steps of a group of jobs: one forward and backward over the common base computes a step of each job.

Each adapter has its own loss, count, gradient norm, learning rate and step, so it ends as it would alone. A member
whose loss is not finite leaves, and the others are unaffected: no value of its rows enters theirs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ringmaster.techniques.data import num_tokens_of
from ringmaster.techniques.runtime.processes.ranks import Ranks
from ringmaster.techniques.training.fused.base.shared_base import Stem
from ringmaster.techniques.training.fused.batches import in_order
from ringmaster.techniques.training.fused.member import Member
from ringmaster.techniques.training.fused.rows import Row, lay_below, sum_gradients
from ringmaster.techniques.training.losses import Batch, SumAndCount
from ringmaster.techniques.training.metrics import Metrics


@dataclass(frozen=True, kw_only=True)
class MemberReport:
    """The report of one step of one job.

    step: the step.
    loss: the mean loss over the job's batch; NaN if `count` is 0.
    count: the number of labels (or rows) that the mean is over.
    seconds: the job's share of the group's step time.
    num_tokens: of the job's batch, by `num_tokens_of`.
    """

    step: int
    loss: float
    count: float
    seconds: float
    num_tokens: int


class Group:
    """The jobs that are trained together now. Jobs may join and leave between any two steps.

    stem: the shared base.
    ranks: the ranks that divide each job's batch. All have the same members and take the same steps.
    """

    def __init__(self, stem: Stem, *, ranks: Ranks | None = None) -> None:
        self.stem = stem
        self._ranks = ranks if ranks is not None and ranks.num_ranks > 1 else None
        self.members: list[Member] = []
        self._is_changed = False

    def join(self, member: Member) -> None:
        """Adds a member from the next step on. Raises ValueError if its precision differs from the others'."""
        self.stem.compute_in(member.job.precision)
        self.stem.open(member.sites, member.own)
        self.members.append(member)
        self._is_changed = True

    def leave(self, member: Member) -> None:
        """Removes a member before the next step."""
        self.members.remove(member)
        self._is_changed = True

    def step(self) -> dict[str, MemberReport]:
        """Takes the next step of every member; returns the reports by name.

        A member whose loss is not finite, or whose count is 0, is not updated.
        """
        started_s = time.perf_counter()
        batches = [member.batch() for member in self.members]
        self._lay_out(batches)
        parts = [member.part(batch) for member, batch in zip(self.members, batches, strict=True)]
        for member in self.members:
            member.expect_gradients()
        losses = [partial(_loss_of, member, batch) for member, batch in zip(self.members, batches, strict=True)]
        learnt = self.stem.learn(parts, losses)
        sums: list[float] = torch.stack([each.loss_sum for each in learnt]).tolist() if learnt else []
        counts = [each.count for each in learnt]
        tokens = _token_counts(batches)
        if self._ranks is not None and learnt:
            sum_gradients([member.row for member in self.members])
            summed = self._ranks.sum([*sums, *counts, *tokens])
            num = len(sums)
            sums, counts, tokens = summed[:num], summed[num : 2 * num], summed[2 * num :]
        steps = [member.next_step for member in self.members]
        for member, loss_sum, count, each in zip(self.members, sums, counts, learnt, strict=True):
            if count and math.isfinite(loss_sum):
                member.update(count=count, idle=each.idle)  # equal on all ranks, which run the same layers
            else:
                member.drop_gradients()
        seconds = (time.perf_counter() - started_s) / max(len(self.members), 1)
        return {
            member.name: MemberReport(
                step=step,
                loss=loss_sum / count if count else math.nan,
                count=count,
                seconds=seconds,
                num_tokens=round(num_tokens),
            )
            for member, step, loss_sum, count, num_tokens in zip(self.members, steps, sums, counts, tokens, strict=True)
        }

    def _lay_out(self, batches: Sequence[Batch]) -> None:
        """After a change of members, moves the rows of adapters that compute together into one matrix."""
        if not self._is_changed:
            return
        self._is_changed = False
        parts = [member.part(batch) for member, batch in zip(self.members, batches, strict=True)]
        alike: dict[Hashable, list[Row]] = {}
        for i in in_order(parts):
            alike.setdefault(parts[i].layout, []).append(self.members[i].row)
        self.stem.forget()
        for rows in alike.values():
            lay_below(rows)

    @torch.no_grad()
    def evaluate(
        self, members: Sequence[Member] | None = None, *, beat: Callable[[], None] = lambda: None
    ) -> dict[str, dict[str, float]]:
        """The metrics of each member over its held-out data, by name, equal on every rank.

        Each forward takes one batch of every member. beat: called after each forward.
        """
        left = {member.name: (member, member.held_out()) for member in (members or self.members)}
        metrics = {m.name: Metrics(m.job.evaluation.metrics, loss=m.loss, data=m.prepared) for m, _ in left.values()}
        self.stem.model.eval()
        while left:
            batches = {name: batch for name, (_, shares) in left.items() if (batch := next(shares, None)) is not None}
            left = {name: left[name] for name in batches}
            names = list(batches)
            for i, output in self.stem.outputs([left[name][0].part(batches[name][0]) for name in names]):
                name, (inputs, rows) = names[i], batches[names[i]]
                if rows:
                    metrics[name].add(output, inputs, rows=rows)
            beat()
        self.stem.model.train()
        return {name: self._over_ranks(found) for name, found in metrics.items()}

    def _over_ranks(self, metrics: Metrics) -> dict[str, float]:
        return metrics.result(None if self._ranks is None else self._ranks.gather(metrics.parts()))


def _token_counts(batches: Sequence[Batch]) -> list[float]:
    """Returns the input tokens of each batch, by `num_tokens_of`, with one wait for the device."""
    masked = [batch["attention_mask"].sum() for batch in batches if "attention_mask" in batch]
    counted = iter(torch.stack(masked).tolist() if masked else ())
    return [float(next(counted)) if "attention_mask" in batch else float(num_tokens_of(batch)) for batch in batches]


def _loss_of(member: Member, batch: Batch, output: Any) -> SumAndCount:
    return member.loss(output, batch)
