"""The segment of a group: one gang trains several jobs, as adapters of one base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ringmaster.techniques.processes.gang_events import JobResult
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.processes.reporter import Reporter
from ringmaster.techniques.training.fused.group import FusedGroup, join_group, open_group, orders_of
from ringmaster.techniques.training.fused.group_requirements import AT_ONCE
from ringmaster.techniques.training.fused.member import GroupMember
from ringmaster.techniques.training.job_session import SessionJob
from ringmaster.techniques.training.segment_loop import BUILD_TIMEOUT_S, SegmentLoop
from ringmaster.techniques.training.trainer import StepReport


def run(order: GangOrder, reporter: Reporter, *, rank: int = 0) -> JobResult:
    """Trains the order's job and its members. Returns the lead job's result, with the members' results.

    Raises errors that no single member causes: the base cannot be built, memory runs out, or a device fails.
    """
    stepper = FusedStepper(order, reporter, rank=rank)
    segment = SegmentLoop(stepper, orders_of(order), reporter, at_once=order.config.get(AT_ONCE))
    segment.train()
    stepper.ranks.agree(True)  # no rank exits while a peer may still wait for it
    outcomes = dict(segment.outcomes)
    return replace(outcomes.pop(order.job.name), members=outcomes)


class FusedStepper:
    """Takes the steps of the jobs of a group together. A job that fails is left out of the others' steps."""

    isolates = True

    def __init__(self, order: GangOrder, reporter: Reporter, *, rank: int) -> None:
        self.ranks, self._reporter = join_group(order, rank), reporter
        reporter.phase("loading the base", timeout_s=BUILD_TIMEOUT_S)
        self._group = open_group(order, self.ranks)
        self._opened: dict[str, GroupMember] = {}

    def open(self, order: GangOrder) -> SessionJob:
        """Creates a job's member of the group, and restores its newest checkpoint."""
        assert order.checkpoint_dir is not None
        member = GroupMember(order, self._group.stem.model, device=self.ranks.device, ranks=self.ranks)
        member.restore(order.checkpoint_dir, known_step=order.known_step)
        self._opened[member.name] = member
        return member

    def join(self, rank_job: SessionJob) -> None:
        """Adds a job from the next step on."""
        self._group.join(self._opened[rank_job.job.name])

    def remove_job(self, rank_job: SessionJob) -> None:
        """Removes a job before the next step."""
        self._group.remove_member(self._opened.pop(rank_job.job.name))

    def step(self, rank_jobs: Sequence[SessionJob], votes: tuple[float, ...]) -> dict[str, StepReport]:
        """Takes the next step of some jobs, or of all."""
        if len(rank_jobs) == len(self._group.members):
            return self._group.step()
        few = FusedGroup(self._group.stem)
        for member in self._members(rank_jobs):
            few.join(member)
        return few.step()

    def evaluate(self, rank_jobs: Sequence[SessionJob]) -> dict[str, dict[str, float]]:
        """Evaluates jobs together."""
        return self._group.evaluate(self._members(rank_jobs), beat=self._reporter.beat)

    def _members(self, rank_jobs: Sequence[SessionJob]) -> list[GroupMember]:
        return [self._opened[rank_job.job.name] for rank_job in rank_jobs]
