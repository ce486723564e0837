"""The verification of untrusted work: what repetitions prove, and how often a lie is found."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster.features.untrusted.execute import (
    StateCommitment,
    VerificationResult,
    first_difference,
    first_suspect,
    judge,
)

DIGESTS = st.lists(st.integers(0, 3).map(str), min_size=1, max_size=40).map(tuple)


def made(digests, *, node="n", first_step=0, final="end", every=1, **changes):
    steps = tuple(range(first_step + every, first_step + every * len(digests) + 1, every))
    return StateCommitment(
        node=node, first_step=first_step, last_step=steps[-1], steps=steps, digests=digests, final=final, **changes
    )


@given(DIGESTS, st.data())
def test_bisection_finds_the_first_step_that_differs(digests, data):
    other = data.draw(st.lists(st.integers(0, 3).map(str), min_size=len(digests), max_size=len(digests)).map(tuple))
    index = next((i for i, pair in enumerate(zip(digests, other, strict=True)) if pair[0] != pair[1]), None)
    expected = None if index is None else (index, index + 1)
    assert first_difference(made(digests), made(other)) == expected


@given(DIGESTS)
def test_equal_work_is_never_accused(digests):
    assert judge(made(digests), [made(digests, node="m")]).result == VerificationResult.EQUAL


def test_a_checkpoint_that_is_not_the_state_is_a_difference_after_the_last_step():
    assert first_difference(made(("1", "2")), made(("1", "2"), final="other")) == (2, 2)


def test_only_steps_that_both_have_digested_are_compared():
    one, other = made(("1", "2", "3", "4")), made(("2", "x"), every=2)
    assert first_difference(one, other) == (2, 4)


A, B, C = ("1", "2", "3"), ("1", "x", "x"), ("1", "y", "y")


@pytest.mark.parametrize(
    ("segment", "repetitions", "result"),
    [
        (A, [B], VerificationResult.DIFFERENT),
        (B, [A, A], VerificationResult.LIE),
        (A, [B, A], VerificationResult.WRONG_REPETITION),
        (A, [B, C], VerificationResult.NO_FIXED_BITS),
    ],
)
def test_a_third_node_decides(segment, repetitions, result):
    verdict = judge(made(segment), [made(each) for each in repetitions])
    assert verdict.result == result
    assert (verdict.after, verdict.until) == (1, 2)


def test_all_work_of_a_node_that_nobody_has_repeated_is_suspect():
    segments = [
        made(A, node="other"),
        made(A, node="liar", first_step=3, is_repeated=True),
        made(A, node="liar", first_step=6),
        made(A, node="liar", first_step=9),
    ]
    assert first_suspect(segments, node="liar") == 6
    assert first_suspect(segments, node="nobody") is None
    assert first_suspect([replace(each, is_repeated=True) for each in segments], node="liar") is None


def detection_probability(num_segments, *, num_lies, num_repeated):
    """The probability that the documentation gives."""
    return 1.0 - math.comb(num_segments - num_lies, num_repeated) / math.comb(num_segments, num_repeated)


@pytest.mark.parametrize(("num_lies", "expected"), [(1, 0.10), (10, 0.67), (30, 0.97)])
def test_the_probability_of_detection(num_lies, expected):
    assert detection_probability(100, num_lies=num_lies, num_repeated=10) == pytest.approx(expected, abs=0.01)


@given(st.integers(1, 60), st.data())
def test_the_probability_of_detection_is_that_of_the_draws(num_segments, data):
    num_lies = data.draw(st.integers(0, num_segments))
    num_repeated = data.draw(st.integers(0, num_segments))
    missed = math.prod((num_segments - num_lies - i) / (num_segments - i) for i in range(num_repeated))
    found = detection_probability(num_segments, num_lies=num_lies, num_repeated=num_repeated)
    assert found == pytest.approx(1 - max(missed, 0.0), abs=1e-9)


def test_who_lies_in_one_of_fifty_segments_is_found_within_2300():
    assert detection_probability(2300, num_lies=2300 // 50, num_repeated=230) >= 0.99
    generator = random.Random(0)
    runs, num_found, num_accused = 400, 0, 0
    for _ in range(runs):
        for segment in range(2300):
            is_lie = segment % 50 == 17
            if generator.random() < 0.1:
                work, truth = made(B if is_lie else A, node="liar"), made(A)
                verdict = judge(work, [truth])
                if verdict.result == VerificationResult.DIFFERENT:
                    num_found += judge(work, [truth, truth]).result == VerificationResult.LIE
                    num_accused += not is_lie
                    break
    assert num_found / runs >= 0.98  # the probability is .992
    assert num_accused == 0


def test_no_honest_run_of_a_hundred_is_accused():
    generator = random.Random(1)
    for _ in range(100):
        for _ in range(50):
            digests = tuple(str(generator.random()) for _ in range(8))
            work, truth = made(digests, node="helper"), made(digests)
            assert judge(work, [truth]).result == VerificationResult.EQUAL
