"""The kinds of reasons for plans, from the texts that the executor writes."""

import re
from pathlib import Path

import pytest

from ringmaster.tasks.pool.pool_monitor import reason_of

ROOT = Path(__file__).parents[4]

TEXTS = {
    "start": "start",
    "resumed": "start",
    "an executor began; batch nightly has 3 jobs": "start",
    "batch nightly has 3 jobs": "new_jobs",
    "node a b is gone (silent for 60 s), node c came": "devices",
    "node c came": "devices",
    "the health of devices has changed": "devices",
    "b1/llama has lost its devices": "devices",
    "b1/llama ran out of memory under ddp on 2": "failure",
    "the gang of b1/llama crashed 3 times, the last time: x: the other jobs of its group continue alone": ("failure"),
    "the gang of b1/llama ran out of memory: the other jobs of its group continue alone": "failure",
    "b1/llama trains no further: the other jobs of its group continue alone": "group",
    "b1/llama continues alone": "group",
    "in danger of missing their deadlines: a by 3 s": "deadline",
    "the clock": "clock",  # of an earlier release
    "the speeds measured since the last plan": "clock",
    "b1/start is late by 30 s": "forecast",
    "b1/llama is early by 30 s": "forecast",
    "jobs were cancelled": "request",
    "jobs were paused": "request",
    "jobs were resumed": "request",
    "jobs were retried": "request",
    "the priorities of batch nightly changed": "request",
    "a person has set 100 steps for llama": "request",
    "a, b and 3 others may train on; c stopped early": "steering",
    "c stopped early": "steering",
    "b1/c evaluated on more rows": "steering",
    "6 jobs are grouped anew": "group",
    "b1/llama stays on ddp, under which it started": "steering",
    "llama keeps batches of 16 samples in fp32: no other choice is predicted to save 15% of the rest": ("steering"),
    "llama trains on batches of 64 samples in fp32 in place of 16 in fp32 from step 9: 20 steps": "steering",
    "llama keeps the learning rate 0.01: eval/loss after 9 steps is 2 with 0.01, 3 with 0.1": "steering",
    "llama takes, in place of 0.1, the learning rate 0.01: eval/loss after 9 steps is 2 with 0.01": "steering",
    "steps 3 to 9 are verified": "verification",
    "steps 3 to 9 of b1/llama were verified": "verification",
    "the work of node a b is repeated": "verification",
    "node a b was expelled while it trained b1/llama": "verification",
    "node a and node b have other bits: job b1/llama, between step 3 and step 4. Another repetition decides": (
        "verification"
    ),
    "served holds its devices": "devices",
    "served has left its devices": "devices",
    "something else": "other",
}

# Texts that are never a reason alone, but a part of one; the last begins with a choice of batch sizes.
PARTS = {"7 trains no further", "7 trains on 7 in place of 7 in 7 from step 7: "}


@pytest.mark.parametrize("why", TEXTS)
def test_a_text_has_its_kind(why):
    assert reason_of(why) is TEXTS[why]


def test_every_text_that_the_executor_writes_has_a_kind():
    """Finds the literal reasons in the sources, with an example in place of each value."""
    of_features = (ROOT / "src" / "ringmaster" / "features").glob("*/execute.py")
    sources = [*(ROOT / "tasks" / "execution").rglob("*.py"), *(ROOT / "tasks" / "pool").glob("*.py"), *of_features]
    literal = r'(?:request_plan\(|why=)\s*f?"([^"]+)"'
    found = {text for file in sources for text in re.findall(literal, file.read_text())}
    assert len(found) > 10
    examples = {re.sub(r"\{[^}]*\}", "7", text) for text in found if re.search("[a-z]", text)}
    assert {text for text in examples if reason_of(text) == "other"} == PARTS
