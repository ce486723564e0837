"""The verification of work that untrusted nodes return: pure decisions, without input or output.

An untrusted node (a volunteer of Learning@home: Ryabinin and Gusev, arXiv:2002.04013) trains segments of jobs that
allow it. At the end of a segment its gang is committed to digests of the state after some steps, and of the last
checkpoint, which the executor takes itself. Only then it is drawn whether a trusted node repeats the segment from the
checkpoint before it. All bits are to be equal. Where they are not, bisection finds the first step that differs, and
another repetition decides:

    both repetitions equal, the segment not     the untrusted node has lied
    the second repetition equals the segment    the first repetition was wrong
    all three differ                            the job has no fixed bits, and nobody is accused

What an expelled node has trained and nobody has repeated is suspect, so its jobs go back to before the first of it.

Of n segments with L lies, c of which are repeated, at least one lie is found with probability 1 - C(n-L, c) / C(n, c)
(`detection_probability`). What changes no bit of the state, such as a reported loss, is not found.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ringmaster.codec import digest


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


class VerificationResult(StrEnum):
    """What repetitions say of a segment."""

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
    """Returns what one or two repetitions of a segment by trusted nodes say of it."""
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


def detection_probability(num_segments: int, *, num_lies: int, num_repeated: int) -> float:
    """Returns the probability that at least one of the lies is among the segments that are repeated."""
    return 1.0 - math.comb(num_segments - num_lies, num_repeated) / math.comb(num_segments, num_repeated)
