"""The verification of untrusted nodes: has their work repeated, names liars, and takes jobs back to good states.

An untrusted node (a volunteer of Learning@home: Ryabinin and Gusev, arXiv:2002.04013) trains segments of jobs that
allow it. At the end of a segment its gang is committed to digests of the state after some steps, and of the last
checkpoint, which the executor takes itself. Only then it is drawn whether a trusted node repeats the segment from the
checkpoint before it. All bits are to be equal. Where they are not, bisection finds the first step that differs, and
another repetition decides:

    both repetitions equal, the segment not     the untrusted node has lied
    the second repetition equals the segment    the first repetition was wrong
    all three differ                            the job has no fixed bits, and nobody is accused

What an expelled node has trained and nobody has repeated is suspect, so its jobs go back to before the first of it.

Of n segments with L lies, c of which are repeated, at least one lie is found with probability 1 - C(n-L, c) / C(n, c).
What changes no bit of the state, such as a reported loss, is not found.

A repetition is an ordinary segment of the job, on trusted devices and under the same layout, from the checkpoint before
the segment: the later ones are removed, so that the job continues from what trusted nodes have trained. All of it is in
the job's record (`job_table`), so that the next executor continues with it.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from random import SystemRandom
from typing import Any

from ringmaster.codec import digest, from_json, to_json
from ringmaster.errors import CheckpointError
from ringmaster.features.untrusted.job import Untrusted
from ringmaster.tasks.background_worker import in_a_thread
from ringmaster.tasks.execution.executor_hooks import ExecutorContext, ExecutorHook
from ringmaster.tasks.execution.job_rules import JobRule
from ringmaster.tasks.execution.job_table import layout_of
from ringmaster.tasks.execution.progress import RunningSegment
from ringmaster.tasks.storage.journal import ENDED, JobRecord, JobStatus, RecordFeature
from ringmaster.techniques import Job, Profile
from ringmaster.techniques.checkpoints.chain import read_chain, tensor_digests
from ringmaster.techniques.checkpoints.checkpoint import folder_of
from ringmaster.techniques.checkpoints.storage import place_of
from ringmaster.techniques.processes.gang_events import Outcome, OutcomeStatus
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.profiles import UNTRUSTED

SUSPECT_CHECKPOINTS = 20
"""The checkpoints that are kept of a job that untrusted nodes may train: a lie that is found later takes it back."""


class UntrustedRule(JobRule):
    """A segment of an untrusted node is short, and can be repeated on a trusted one."""

    def usable(self, job: Job, profiles: Sequence[Profile]) -> Sequence[Profile]:
        """Returns the options: those on untrusted devices where trusted ones can repeat them.

        These are of the same kind and, unless the job is exact, have the same layout.
        """

        def layout(each: Profile) -> tuple[object, ...]:
            return each.device_type.removesuffix(UNTRUSTED), None if job.is_exact else layout_of(each)

        trusted = [layout(each) for each in profiles if not each.is_untrusted]
        allows = job.feature(Untrusted) is not None
        return tuple(p for p in profiles if not p.is_untrusted or (allows and layout(p) in trusted))

    def options(self, job: Job, record: JobRecord, profiles: Sequence[Profile]) -> Sequence[Profile]:
        """Returns the options on trusted devices where a job must use no others.

        A segment is repeated under its own layout: others have the same bits only of exact jobs.
        """
        known = verification_of(record)
        if known.repeated is None and not known.trusted_only:
            return profiles
        fits = [each for each in profiles if not each.is_untrusted]
        if known.repeated is not None and not job.is_exact:
            fits = [each for each in fits if layout_of(each) == known.repeated.layout]
        return fits

    def goal(self, record: JobRecord, goal: int) -> int:
        """Returns the end of the segment that is repeated, if one is."""
        repeated = verification_of(record).repeated
        return goal if repeated is None else min(goal, repeated.segment.last_step)

    def barred_nodes(self, record: JobRecord) -> Collection[str]:
        """Returns the trusted node that has made the first of two repetitions."""
        repeated = verification_of(record).repeated
        return [] if repeated is None else [each.node for each in repeated.repetitions[:1]]

    def last_step(self, job: Job, profile: Profile, *, first_step: int, last_step: int) -> int:
        """Returns a step after which a gang on an untrusted node ends."""
        spec = job.feature(Untrusted)
        return last_step if spec is None or not profile.is_untrusted else min(last_step, first_step + spec.verify_steps)

    def order(self, job: Job, record: JobRecord, order: GangOrder) -> GangOrder:
        """Returns the order with the steps after which digests of the state are taken, in a repetition."""
        if job.feature(Untrusted) is None:
            return order
        repeated = verification_of(record).repeated
        steps = () if repeated is None else repeated.segment.steps
        return replace(order, digested_steps=steps, keep_checkpoints=max(order.keep_checkpoints, SUSPECT_CHECKPOINTS))


@dataclass(frozen=True, kw_only=True)
class StateCommitment:
    """What a gang has made of a segment of a job; it cannot change any more when a repetition is drawn.

    node: where rank 0 ran.
    first_step, last_step: the steps of the checkpoints before and after the segment.
    steps, digests: the digests of the state after some of its steps, in their order.
    final: the digest of the checkpoint of `last_step`, as the executor reads it; "" where there is no whole one.
    is_repeated: whether a trusted node has repeated the segment and found the same bits.
    """

    node: str
    first_step: int
    last_step: int
    steps: tuple[int, ...] = ()
    digests: tuple[str, ...] = ()
    final: str = ""
    is_repeated: bool = False

    def chain(self, steps: Sequence[int]) -> list[str]:
        """Returns the digests after `steps` and of the last checkpoint, each with all before it.

        So two chains that differ anywhere differ from there on.
        """
        known, chain, parent = dict(zip(self.steps, self.digests, strict=True)), [], ""
        for value in (*(known[step] for step in steps), self.final):
            parent = digest([parent, value], length=32)
            chain.append(parent)
        return chain


@dataclass(frozen=True, kw_only=True)
class RepeatedSegment:
    """A segment of an untrusted node that trusted nodes repeat under its layout, and the repetitions so far."""

    segment: StateCommitment
    layout: Mapping[str, Any]
    repetitions: tuple[StateCommitment, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verification(RecordFeature):
    """What the record of a job keeps that untrusted nodes may train.

    untrusted_segments: what untrusted nodes have made of it, as far as its present state contains that.
    trusted_only: whether no untrusted node may train it any more.
    back_to: the step to which it is taken back once its gang has ended.
    """

    untrusted_segments: tuple[StateCommitment, ...] = ()
    repeated: RepeatedSegment | None = None
    trusted_only: bool = False
    back_to: int | None = None


def verification_of(record: JobRecord) -> Verification:
    """Returns what the record of a job keeps of its verification."""
    return record.feature(Verification) or Verification()


class VerificationResult(StrEnum):
    """The result of the repetitions of a segment."""

    EQUAL = "equal"
    DIFFERENT = "different"  # another repetition has to decide
    LIE = "lie"
    WRONG_REPETITION = "wrong repetition"
    NO_FIXED_BITS = "no fixed bits"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found, and after which step the states first differ.

    after, until: the states are equal after step `after`, and differ after step `until`; None where nothing differs.
    """

    result: VerificationResult
    after: int | None = None
    until: int | None = None


def judge(segment: StateCommitment, repetitions: Sequence[StateCommitment]) -> Verdict:
    """Returns the verdict on a segment from one or two repetitions by trusted nodes."""
    first, *others = repetitions
    difference = first_difference(segment, first)
    if difference is None:
        return Verdict(result=VerificationResult.EQUAL)
    if not others:
        result = VerificationResult.DIFFERENT
    elif first_difference(first, others[-1]) is None:
        result = VerificationResult.LIE
    elif first_difference(segment, others[-1]) is None:
        result = VerificationResult.WRONG_REPETITION
    else:
        result = VerificationResult.NO_FIXED_BITS
    return Verdict(result=result, after=difference[0], until=difference[1])


def first_difference(one: StateCommitment, other: StateCommitment) -> tuple[int, int] | None:
    """Returns between which two steps the states of two gangs begin to differ; None where they are equal.

    The search reads log2(n) of n links, as links that follow a different one differ.
    """
    steps = sorted(set(one.steps) & set(other.steps))
    chains = list(zip(one.chain(steps), other.chain(steps), strict=True))
    index = bisect_left(chains, True, key=lambda pair: pair[0] != pair[1])
    if index == len(chains):
        return None
    known = [one.first_step, *steps, one.last_step]
    return known[index], known[index + 1]


def first_suspect(segments: Sequence[StateCommitment], *, node: str) -> int | None:
    """Returns the step before the first segment that a node trained and nobody has repeated; None without one."""
    return min((each.first_step for each in segments if each.node == node and not each.is_repeated), default=None)


logger = logging.getLogger(__name__)

COMMITMENT = "commitment"
"""The key of an outcome's result with the `StateCommitment` of its gang."""


class SegmentReferee(ExecutorHook):
    """Decides which segments are repeated, and what follows from repetitions.

    draw: returns a number in [0, 1) that no node can know before.
    """

    def __init__(self, execution: ExecutorContext, *, draw: Callable[[], float] = SystemRandom().random) -> None:
        super().__init__(execution)
        self._job_table, self._plan_progress = execution.job_table, execution.plan_progress
        self.draw = draw

    def outcome_of(self, running: RunningSegment, outcome: Future[Outcome]) -> Future[Outcome]:
        """Returns the outcome of a segment with what its gang has made, where the job may be verified."""
        node, job, first_step = running.segment.devices[0][0], running.segment.job, running.first_step
        entry = self._job_table.entries[job]
        if entry.job.feature(Untrusted) is None:
            return outcome
        if (repeated := self._verification(job).repeated) is not None:
            first_step = repeated.segment.first_step
        root = entry.paths.checkpoint_dir(entry.job_in_batch)

        def wait() -> Outcome:
            made = outcome.result()
            last_step = made.result.step or 0
            if made.status not in (OutcomeStatus.DONE, OutcomeStatus.PREEMPTED) or last_step <= first_step:
                return made
            value = commitment_of(root, node=node, first_step=first_step, last_step=last_step)
            others = {**made.result.others, COMMITMENT: to_json(value)}
            return replace(made, result=replace(made.result, others=others))

        return in_a_thread("commitment", wait)

    def decide(self, running: RunningSegment, outcome: Outcome) -> str | None:
        """Acts on an outcome. Returns what follows; None where others decide."""
        job = running.segment.job
        record = self._job_table.records[job]
        if self._job_table.entries[job].job.feature(Untrusted) is None or record.status in ENDED:
            return None
        known = self._verification(job)
        if (step := known.back_to) is not None:
            return self._go_back(job, step, why="the work of an expelled node is repeated")
        value = outcome.result.others.get(COMMITMENT)
        made = None if value is None else from_json(StateCommitment, value)
        if running.profile.is_untrusted:
            return self._after_untrusted(running, outcome, made)
        if known.repeated is None or made is None or made.last_step < known.repeated.segment.last_step:
            return None
        return self._after_repetition(job, known.repeated, made)

    def _after_untrusted(self, running: RunningSegment, outcome: Outcome, made: StateCommitment | None) -> str | None:
        job, node = running.segment.job, running.segment.devices[0][0]
        if any(map(self._execution.is_out, running.segment.devices)):
            return self._go_back(job, running.first_step, why=f"node {node} must not be used, where {job} trained")
        is_in_order = outcome.status in (OutcomeStatus.DONE, OutcomeStatus.PREEMPTED)
        if made is None and is_in_order:
            return None  # it has trained nothing
        if made is None or not is_in_order or made.last_step > running.ordered_step:
            if outcome.status != OutcomeStatus.LOST:  # its word alone must not fail the job
                self._write(job, trusted_only=True)
            return self._go_back(job, running.first_step, why=f"node {node} did not end its segment of {job} in order")
        self._write(job, untrusted_segments=(*self._verification(job).untrusted_segments, made))
        untrusted = self._job_table.entries[job].job.feature(Untrusted)
        assert untrusted is not None, "other jobs get trusted nodes"
        if self.draw() >= untrusted.verify_share and made.final and made.steps:
            return None
        self._write(job, repeated=RepeatedSegment(segment=made, layout=layout_of(running.profile)))
        return self._go_back(job, made.first_step, why=f"steps {made.first_step} to {made.last_step} are verified")

    def _after_repetition(self, job: str, repeated: RepeatedSegment, made: StateCommitment) -> str | None:
        segment, repetitions = repeated.segment, (*repeated.repetitions, made)
        verdict = judge(segment, repetitions)
        if verdict.result == VerificationResult.DIFFERENT:
            self._write(job, repeated=replace(repeated, repetitions=repetitions))
            return self._go_back(job, segment.first_step, why=_sentence(job, segment, repetitions, verdict))
        known = self._verification(job)
        self._write(
            job,
            untrusted_segments=tuple(
                replace(each, is_repeated=each.is_repeated or each == segment) for each in known.untrusted_segments
            ),
            repeated=None,
            trusted_only=known.trusted_only or verdict.result == VerificationResult.NO_FIXED_BITS,
        )
        self._job_table.renew(job)
        self._execution.request_plan(f"steps {segment.first_step} to {segment.last_step} of {job} were verified")
        if verdict.result == VerificationResult.EQUAL:
            return None
        why = _sentence(job, segment, repetitions, verdict)
        logger.error("%s", why)
        if verdict.result != VerificationResult.LIE:
            return None
        self._execution.expel(segment.node, why)
        suspects = self._take_back(segment.node)
        return why if job in suspects else None

    def _take_back(self, node: str) -> set[str]:
        """Takes the jobs back to before the first work of an expelled node that nobody has repeated; returns them."""
        result = set()
        for job, record in list(self._job_table.records.items()):
            step = first_suspect(verification_of(record).untrusted_segments, node=node)
            if step is None:
                continue
            if record.status in ENDED:
                logger.error("%s has ended with work of node %s that nobody has repeated: train it again", job, node)
                continue
            result.add(job)
            gangs = [each for each in self._plan_progress.running.values() if job in each.jobs]
            if gangs:
                self._write(job, back_to=step)
                for each in gangs:
                    self._execution.stop(each)
            else:
                self._go_back(job, step, why=f"the work of node {node} is repeated")
        return result

    def _go_back(self, job: str, step: int, *, why: str) -> str:
        """Removes the checkpoints of a job after `step`, and has it planned again; returns what follows."""
        entry, record = self._job_table.entries[job], self._job_table.records[job]
        place = place_of(entry.paths.checkpoint_dir(entry.job_in_batch))
        for name in place.names():
            if name > folder_of(step):
                place.remove(name)
        start = entry.job.started_from.step if entry.job.started_from is not None else 0
        left = max((int(name.removeprefix("step-")) for name in place.names()), default=start)
        known = verification_of(record)
        segments, repeated = [each for each in known.untrusted_segments if each.last_step <= left], known.repeated
        status = JobStatus.WAITING if record.status == JobStatus.RUNNING else record.status
        if repeated is not None and left < repeated.segment.first_step:
            repeated = None
        elif repeated is not None:
            segments.append(repeated.segment)
        changed = replace(known, back_to=None, untrusted_segments=tuple(segments), repeated=repeated)
        self._job_table.write(job, status=status, step=left, features=(changed,))
        self._job_table.renew(job)
        self._plan_progress.drop(job)
        self._execution.request_plan(why)
        return f"again from step {left}: {why}"

    def _verification(self, job: str) -> Verification:
        return verification_of(self._job_table.records[job])

    def _write(self, job: str, **changes: Any) -> None:
        self._job_table.write(job, features=(replace(self._verification(job), **changes),))


def _sentence(job: str, segment: StateCommitment, repetitions: Sequence[StateCommitment], verdict: Verdict) -> str:
    """Returns a readable description of a verdict."""
    place = f"job {job}, between step {verdict.after} and step {verdict.until}"
    match verdict.result:
        case VerificationResult.LIE:
            return f"node {segment.node} did not train as ordered and is expelled: {place}, its state has other bits"
        case VerificationResult.WRONG_REPETITION:
            return f"node {repetitions[0].node} is trusted and computed other bits than two nodes: {place}. Check it"
        case VerificationResult.NO_FIXED_BITS:
            return f"no two repetitions have the same bits: {place}. The job trains on trusted nodes only from now on"
    return f"node {segment.node} and node {repetitions[0].node} have other bits: {place}. Another repetition decides"


def commitment_of(root: str, *, node: str, first_step: int, last_step: int) -> StateCommitment:
    """Returns what a gang has made of the steps up to its last checkpoint, which is read and digested here."""
    chain, final = read_chain(root), ""
    with suppress(CheckpointError, OSError, ValueError, KeyError):  # "" means that there is no complete checkpoint
        final = digest(tensor_digests(root, last_step), length=32)
    known = {int(s): text for link in (chain.links if chain else ()) for s, text in link.steps.items()}
    steps = tuple(step for step in sorted(known) if first_step < step <= last_step)
    digests = tuple(known[step] for step in steps)
    return StateCommitment(
        node=node, first_step=first_step, last_step=last_step, steps=steps, digests=digests, final=final
    )


JOB_RULES = (UntrustedRule(),)
EXECUTOR_HOOKS = (SegmentReferee,)
RECORD_FEATURES = (Verification,)
