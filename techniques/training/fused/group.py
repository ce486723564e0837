"""The steps of a group of jobs: one forward and backward over the common base computes a step of each job.

Each adapter has its own loss, count, gradient norm, learning rate and step, so it ends as it would alone. A member
whose loss is not finite leaves, and the others are unaffected: no value of its rows enters theirs.
"""

import math
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ringmaster.techniques.checkpoints.checkpoint import WritePieces
from ringmaster.techniques.checkpoints.state import HostCopies, piece_writer
from ringmaster.techniques.data import num_tokens_of
from ringmaster.techniques.job import Job
from ringmaster.techniques.models.adapters import own_leaves
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.facts import model_facts
from ringmaster.techniques.models.peft_format import resolved
from ringmaster.techniques.multi_adapter.adapter_batches import in_order
from ringmaster.techniques.multi_adapter.multi_adapter_base import MultiAdapterBase, shard
from ringmaster.techniques.multi_adapter.packed_attention import packed_attention
from ringmaster.techniques.multi_adapter.parameter_rows import ParameterRow, lay_below, sum_gradients
from ringmaster.techniques.processes.gang_events import JobResult
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.processes.ranks import RankContext, join
from ringmaster.techniques.processes.reporter import Reporter
from ringmaster.techniques.training.bound_loss import SampleTensors
from ringmaster.techniques.training.callbacks import change_base
from ringmaster.techniques.training.fused.group_requirements import grouping_obstacle, mesh_shape
from ringmaster.techniques.training.fused.member import GroupMember
from ringmaster.techniques.training.metric_totals import MetricTotals
from ringmaster.techniques.training.rank_job import Root, prepared_data
from ringmaster.techniques.training.segment_loop import BUILD_TIMEOUT_S
from ringmaster.techniques.training.trainer import StepReport
from ringmaster.techniques.training.trial import trial


class FusedGroup:
    """The jobs that are trained together now. Jobs may join and leave between any two steps.

    stem: the shared base.
    ranks: the ranks that divide each job's batch. All have the same members and take the same steps.
    """

    def __init__(self, stem: MultiAdapterBase, *, ranks: RankContext | None = None) -> None:
        self.stem = stem
        self._ranks = ranks if ranks is not None and ranks.num_ranks > 1 else None
        self.members: list[GroupMember] = []
        self._is_changed = False

    def join(self, member: GroupMember) -> None:
        """Adds a member from the next step on. Raises ValueError if its precision differs from the others'."""
        self.stem.compute_in(member.job.precision)
        self.stem.open(member.sites, member.own)
        self.members.append(member)
        self._is_changed = True

    def remove_member(self, member: GroupMember) -> None:
        """Removes a member before the next step."""
        self.members.remove(member)
        self._is_changed = True

    def step(self) -> dict[str, StepReport]:
        """Takes the next step of every member; returns the reports by name, with the seconds of all.

        A member whose loss is not finite, or whose count is 0, is not updated; the loss of the latter is NaN.
        """
        started_s = time.perf_counter()
        batches = [member.batch() for member in self.members]
        self._lay_out(batches)
        parts = [member.part(batch) for member, batch in zip(self.members, batches, strict=True)]
        for member in self.members:
            member.expect_gradients()
        losses = [partial(member.loss, batch=batch) for member, batch in zip(self.members, batches, strict=True)]
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
        seconds = time.perf_counter() - started_s
        return {
            member.name: StepReport(
                index=step,
                loss=loss_sum / count if count else math.nan,
                seconds=seconds,
                num_samples=member.job.global_batch_size,
                num_tokens=round(num_tokens),
                count=count,
            )
            for member, step, loss_sum, count, num_tokens in zip(self.members, steps, sums, counts, tokens, strict=True)
        }

    def _lay_out(self, batches: Sequence[SampleTensors]) -> None:
        """After a change of members, moves the rows of adapters that compute together into one matrix."""
        if not self._is_changed:
            return
        self._is_changed = False
        parts = [member.part(batch) for member, batch in zip(self.members, batches, strict=True)]
        alike: dict[Hashable, list[ParameterRow]] = {}
        for i in in_order(parts):
            alike.setdefault(parts[i].layout, []).append(self.members[i].row)
        self.stem.forget()
        for rows in alike.values():
            lay_below(rows)

    @torch.no_grad()
    def evaluate(
        self,
        members: Sequence[GroupMember] | None = None,
        *,
        beat: Callable[[], None] = lambda: None,
        max_batches: int | None = None,
    ) -> dict[str, dict[str, float]]:
        """The metrics of each member over its held-out data, by name, equal on every rank.

        Each forward takes one batch of every member. beat: called after each forward. max_batches: the most global
        batches of a member; None for those that its job evaluates.
        """
        left = {m.name: (m, m.held_out(max_batches=max_batches)) for m in (members or self.members)}
        metrics = {
            m.name: MetricTotals(m.job.evaluation.metrics, loss=m.loss, data=m.prepared, part=m.evaluated_rows(m.loss))
            for m, _ in left.values()
        }
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
        ranks = self._ranks
        results = {
            name: each.result(None if ranks is None else ranks.gather(each.parts())) for name, each in metrics.items()
        }
        for m in members or self.members:
            m.observe_rows(metrics[m.name].row_values)
        return results


def _token_counts(batches: Sequence[SampleTensors]) -> list[float]:
    """Returns the input tokens of each batch, by `num_tokens_of`, with one wait for the device."""
    masked = [batch["attention_mask"].sum() for batch in batches if "attention_mask" in batch]
    counted = iter(torch.stack(masked).tolist() if masked else ())
    return [float(next(counted)) if "attention_mask" in batch else float(num_tokens_of(batch)) for batch in batches]


def orders_of(order: GangOrder) -> list[GangOrder]:
    """An order for each job of a group, the lead job's first.

    The fields that belong to a job alone come from the member's order; all others come from the lead job's.
    """
    lead = replace(order, members=())
    return [lead] + [
        replace(
            lead,
            job=member.job,
            data=member.data,
            folder=member.folder,
            checkpoint_dir=member.checkpoint_dir,
            model_dir=member.model_dir,
            model_url=member.model_url,
            weights_from=member.weights_from,
            last_step=member.last_step,
            keep_checkpoints=member.keep_checkpoints,
        )
        for member in order.members
    ]


def join_group(order: GangOrder, rank: int) -> RankContext:
    """Joins the other ranks of a group's gang, if there are any."""
    num_ranks = order.num_devices  # one a device
    return join(order, rank, num_ranks=num_ranks, axes=mesh_shape(num_ranks, order.config))


def open_group(order: GangOrder, ranks: RankContext) -> FusedGroup:
    """The group of an order: the base of its job on the ranks' devices, without members yet.

    Raises ValueError if the order's jobs cannot be trained together.
    """
    job, data = order.job, prepared_data(order)
    jobs = [job, *(member.job for member in order.members)]
    if reason := grouping_obstacle(jobs, model_facts(job.model, data=data), num_ranks=ranks.num_ranks):
        raise ValueError(f"shared_base: {reason}. To fix: train it alone")
    weights = Path(order.weights_from) if order.weights_from else None
    base = build_model(job.model, data=data, seed=job.seed, weights_from=weights)
    change_base(order, base, job.adapter)
    own = _own(base, jobs)
    attention = None
    if ranks.mesh is not None and order.config.get("base", "whole") == "sharded":
        attention = packed_attention(base)
        shard(base, ranks.mesh, precision=job.precision, unrounded=own)
    else:
        base = base.to(ranks.device)
    recompute = order.config.get("recompute", "none")
    return FusedGroup(MultiAdapterBase(base, recompute=recompute, unrounded=own, attention=attention), ranks=ranks)


def _own(base: nn.Module, jobs: Sequence[Job]) -> set[str]:
    """The names of the modules of which any job trains weights of its own, which start as copies of the base's."""
    result: set[str] = set()
    for job in jobs:
        assert job.adapter is not None
        with suppress(ValueError, OSError):  # raised again, and reported, when the job's member is created
            result.update(own_leaves(base, resolved(job.adapter)))
    return result


def profile(order: GangOrder, reporter: Reporter, *, rank: int = 0) -> JobResult:
    """Runs `techniques.training.trial.trial` on all jobs of the order together.

    All durations are the gang's; those of the checkpoint, export and evaluation cover all jobs.
    """
    ranks = join_group(order, rank)
    reporter.phase("building the model", timeout_s=BUILD_TIMEOUT_S)
    result = trial(GroupTrial(order, ranks, reporter), order, reporter)
    ranks.agree(True)  # no rank exits while a peer may still wait for it
    return result


class GroupTrial:
    """The jobs of a group with the interface of one trainer. They start from fresh weights and ignore last steps."""

    def __init__(self, order: GangOrder, ranks: RankContext, reporter: Reporter) -> None:
        self.ranks, self._reporter, self._num_steps = ranks, reporter, 0
        self._group = open_group(order, ranks)
        for each in orders_of(order):
            self._group.join(GroupMember(each, self._group.stem.model, device=ranks.device, ranks=ranks))
            reporter.beat()

    def step(self, votes: tuple[float, ...] = ()) -> StepReport:
        """One step of every job; reports the loss of the first job."""
        started_s = time.perf_counter()
        first = next(iter(self._group.step().values()))
        vote_sums = tuple(self.ranks.sum(list(votes)))
        seconds = time.perf_counter() - started_s
        self._num_steps += 1
        self._reporter.beat()
        return StepReport(index=self._num_steps - 1, loss=first.loss, seconds=seconds, vote_sums=vote_sums)

    def pieces(self, *, copies: HostCopies | None = None) -> WritePieces:
        """The checkpoint pieces of all jobs."""
        named = {f"{m.name}/{k}": v for m in self._group.members for k, v in m.written().items()}
        return piece_writer(named, copies=copies)

    def save(self, root: Root) -> float:
        """Saves the jobs one after another, each in its own folder; returns the seconds."""
        started_s = time.perf_counter()
        for index, member in enumerate(self._group.members):
            member.save(f"{root}/{index}")
            self._reporter.beat()
        return time.perf_counter() - started_s

    def export(self, folder: Path, root: Root) -> None:
        """Exports the jobs' models from the checkpoints that `save` wrote under `root`."""
        for index, member in enumerate(self._group.members):
            member.export(folder / str(index), f"{root}/{index}")
            self._reporter.beat()

    def evaluate(self, *, max_batches: int | None = None) -> dict[str, dict[str, float]]:
        """Evaluates all jobs together, over at most `max_batches` global batches each."""
        return self._group.evaluate(beat=self._reporter.beat, max_batches=max_batches)

    def num_evaluated_batches(self) -> float:
        """The mean over the jobs of the number of global batches of one evaluation."""
        return sum(member.num_evaluated_batches() for member in self._group.members) / len(self._group.members)
