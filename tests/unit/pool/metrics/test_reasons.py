"""The kinds of reasons for plans, from the texts that the executor writes."""

import re
from pathlib import Path

import pytest

from ringmaster.tasks.pool.pool_monitor import PlanReason, reason_of

ROOT = Path(__file__).parents[4]

TEXTS = {
    "start": PlanReason.START,
    "resumed": PlanReason.START,
    "an executor began; batch nightly has 3 jobs": PlanReason.START,
    "batch nightly has 3 jobs": PlanReason.NEW_JOBS,
    "node a b is gone (silent for 60 s), node c came": PlanReason.DEVICES,
    "node c came": PlanReason.DEVICES,
    "the health of devices has changed": PlanReason.DEVICES,
    "b1/llama has lost its devices": PlanReason.DEVICES,
    "b1/llama ran out of memory under ddp on 2": PlanReason.FAILURE,
    "the gang of b1/llama crashed 3 times, the last time: x: the other jobs of its group continue alone": (
        PlanReason.FAILURE
    ),
    "the gang of b1/llama ran out of memory: the other jobs of its group continue alone": PlanReason.FAILURE,
    "b1/llama trains no further: the other jobs of its group continue alone": PlanReason.GROUP,
    "b1/llama continues alone": PlanReason.GROUP,
    "in danger of missing their deadlines: a by 3 s": PlanReason.DEADLINE,
    "the clock": PlanReason.CLOCK,
    "b1/start is late by 30 s": PlanReason.FORECAST,
    "b1/llama is early by 30 s": PlanReason.FORECAST,
    "jobs were cancelled": PlanReason.REQUEST,
    "jobs were paused": PlanReason.REQUEST,
    "jobs were resumed": PlanReason.REQUEST,
    "jobs were retried": PlanReason.REQUEST,
    "the priorities of batch nightly changed": PlanReason.REQUEST,
    "a person has set 100 steps for llama": PlanReason.REQUEST,
    "a, b and 3 others may train on; c stopped early": PlanReason.STEERING,
    "c stopped early": PlanReason.STEERING,
    "b1/llama stays on ddp, under which it started": PlanReason.STEERING,
    "llama keeps batches of 16 samples in fp32: no other choice is predicted to save 15% of the rest": (
        PlanReason.STEERING
    ),
    "llama trains on batches of 64 samples in fp32 in place of 16 in fp32 from step 9: 20 steps": PlanReason.STEERING,
    "llama keeps the learning rate 0.01: eval/loss after 9 steps is 2 with 0.01, 3 with 0.1": PlanReason.STEERING,
    "llama takes, in place of 0.1, the learning rate 0.01: eval/loss after 9 steps is 2 with 0.01": PlanReason.STEERING,
    "steps 3 to 9 are verified": PlanReason.VERIFICATION,
    "steps 3 to 9 of b1/llama were verified": PlanReason.VERIFICATION,
    "the work of node a b is repeated": PlanReason.VERIFICATION,
    "node a b was expelled while it trained b1/llama": PlanReason.VERIFICATION,
    "node a and node b have other bits: job b1/llama, between step 3 and step 4. Another repetition decides": (
        PlanReason.VERIFICATION
    ),
    "something else": PlanReason.OTHER,
}

# Texts that are never a reason alone, but a part of one; the last begins with a choice of batch sizes.
PARTS = {"7 trains no further", "silent for 7 s", "7 trains on 7 in place of 7 in 7 from step 7: "}


@pytest.mark.parametrize("why", TEXTS)
def test_a_text_has_its_kind(why):
    assert reason_of(why) is TEXTS[why]


def test_every_text_that_the_executor_writes_has_a_kind():
    """Finds the literal reasons in the sources, with an example in place of each value."""
    sources = [*(ROOT / "tasks" / "execution").rglob("*.py"), *(ROOT / "tasks" / "pool").glob("*.py")]
    literal = r'(?:want\(|_want\(|why=)\s*f?"([^"]+)"'
    found = {text for file in sources for text in re.findall(literal, file.read_text())}
    assert len(found) > 10
    examples = {re.sub(r"\{[^}]*\}", "7", text) for text in found if re.search("[a-z]", text)}
    assert {text for text in examples if reason_of(text) is PlanReason.OTHER} == PARTS
