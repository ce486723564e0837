"""The trial of a group: measures a step of all its jobs together, and their checkpoints, export and evaluation."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringmaster.techniques.runtime.checkpoints.checkpoint import WritePieces
from ringmaster.techniques.runtime.checkpoints.state import HostCopies, piece_writer
from ringmaster.techniques.runtime.processes.order import GangOrder
from ringmaster.techniques.runtime.processes.ranks import Ranks
from ringmaster.techniques.runtime.processes.reporter import Reporter
from ringmaster.techniques.training.fused.member import Member
from ringmaster.techniques.training.fused.opening import join_group, open_group, orders_of
from ringmaster.techniques.training.segment_loop import BUILD_PATIENCE_S
from ringmaster.techniques.training.trainer import Root, StepReport
from ringmaster.techniques.training.trial_loop import trial


def profile(order: GangOrder, reporter: Reporter, *, rank: int = 0) -> dict[str, Any]:
    """Runs `techniques.training.trial_loop.trial` on all jobs of the order together.

    All durations are the gang's; those of the checkpoint, export and evaluation cover all jobs.
    """
    ranks = join_group(order, rank)
    reporter.phase("building the model", patience_s=BUILD_PATIENCE_S)
    result = trial(_Together(order, ranks, reporter), order, reporter)
    ranks.agree(True)  # no rank exits while a peer may still wait for it
    return result


class _Together:
    """The jobs of a group with the interface of one trainer. They start from fresh weights and ignore last steps."""

    def __init__(self, order: GangOrder, ranks: Ranks, reporter: Reporter) -> None:
        self.ranks, self._reporter, self._num_steps = ranks, reporter, 0
        self._group = open_group(order, ranks)
        for each in orders_of(order):
            self._group.join(Member(each, self._group.stem.model, device=ranks.device, ranks=ranks))
            reporter.beat()

    def step(self, asks: tuple[float, ...] = ()) -> StepReport:
        """One step of every job; reports the loss of the first job."""
        started_s = time.perf_counter()
        first = next(iter(self._group.step().values()))
        asked = tuple(self.ranks.sum(list(asks)))
        seconds = time.perf_counter() - started_s
        self._num_steps += 1
        self._reporter.beat()
        return StepReport(step=self._num_steps - 1, loss=first.loss, seconds=seconds, asked=asked)

    def pieces(self, *, copies: HostCopies | None = None) -> WritePieces:
        """The checkpoint pieces of all jobs."""
        named = {f"{m.name}/{k}": v for m in self._group.members for k, v in m.written().items()}
        return piece_writer(named, copies=copies)

    def save(self, root: Root) -> float:
        """Saves the jobs one after another, each in its own folder; returns the seconds."""
        started_s = time.perf_counter()
        for index, member in enumerate(self._group.members):
            member.order = replace(member.order, checkpoint_dir=f"{root}/{index}")
            member.save()
            self._reporter.beat()
        return time.perf_counter() - started_s

    def export(self, folder: Path, root: Root) -> None:
        """Exports the jobs' models from the checkpoints that `save` wrote under `root`."""
        for index, member in enumerate(self._group.members):
            member.order = replace(member.order, checkpoint_dir=f"{root}/{index}", model_dir=str(folder / str(index)))
            member.export()
            self._reporter.beat()

    def evaluate(self, *, max_batches: int | None = None) -> dict[str, dict[str, float]]:
        """Evaluates all jobs together, over at most `max_batches` global batches each."""
        jobs = {member.name: member.job for member in self._group.members}
        for member in self._group.members:
            wanted = member.job.evaluation
            num_batches = min(max_batches or wanted.max_batches, wanted.max_batches)
            member.job = replace(member.job, evaluation=replace(wanted, max_batches=num_batches))
        metrics = self._group.evaluate(beat=self._reporter.beat)
        for member in self._group.members:
            member.job = jobs[member.name]
        return metrics

    def num_evaluated_batches(self) -> float:
        """The mean over the jobs of the number of global batches of one evaluation."""
        return sum(member.num_evaluated_batches() for member in self._group.members) / len(self._group.members)
