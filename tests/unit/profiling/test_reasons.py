"""Reasons why a job cannot be trained: the cause first, and techniques that do not apply only on request."""

from ringmaster.tasks.profiling.search import ProfilingFailure, refusal_line, why_nothing_fits
from ringmaster.techniques.preflight_result import Refusal

TOO_FEW = [
    Refusal(technique=name, num_devices=1, reason="needs two devices or more")
    for name in ("ddp", "fsdp", "tensor", "context", "pipeline", "zero1", "zero2", "mesh")
]
BOOM = ProfilingFailure(kind="failed", message="rank 0: RuntimeError: boom")
NO_MEMORY = ProfilingFailure(kind="out_of_memory", message="rank 0: ran out of memory")


def too_large(technique, gib, *, config=None):
    reason = f"needs {gib} GiB of 1.0 a device at the least"
    return Refusal(technique=technique, num_devices=1, reason=reason, is_too_large=True, config=config)


def test_what_a_trial_died_of_comes_first_and_what_does_not_apply_not_at_all():
    assert why_nothing_fits(TOO_FEW, [BOOM]) == "rank 0: RuntimeError: boom (in its trial)"


def test_the_same_cause_is_told_once_and_before_a_want_of_memory():
    said = why_nothing_fits(TOO_FEW, [NO_MEMORY, BOOM, BOOM])
    assert said == "rank 0: RuntimeError: boom; rank 0: ran out of memory (in each of its 3 trials)"


def test_without_a_trial_the_memory_that_is_lacking_is_the_cause():
    said = why_nothing_fits([*TOO_FEW, too_large("single", 2.0), too_large("offload", 1.5)], [])
    assert said.startswith("no technique can train it here: needs 2.0 GiB of 1.0 a device at the least (single on 1); ")
    assert "two devices" not in said
    assert "To fix: larger devices, or a smaller model; --verbose" in said


def test_where_nothing_applies_the_reasons_are_told_a_few_of_them():
    others = [Refusal(technique=f"t{i}", num_devices=1, reason=f"reason {i}") for i in range(9)]
    said = why_nothing_fits([*TOO_FEW[:2], *others], [])
    assert said.startswith("no technique can train it here: needs two devices or more (ddp, fsdp on 1); reason 0")
    assert "reason 1 " in said and "reason 2" not in said


def test_all_of_it_is_a_line_for_jobs_that_share_it():
    config = too_large("single", 2.0, config={"micro_batch": 8})
    refused = {"a": [*TOO_FEW[:2], config], "b": TOO_FEW[:2], "c": [too_large("single", 2.0)], "d": []}
    assert refusal_line(refused) == (
        "left out: ddp, fsdp on 1: needs two devices or more (for a and 1 more); "
        "single on 1: needs 2.0 GiB of 1.0 a device at the least (for c)"
    )
    assert refusal_line({"a": TOO_FEW[:2], "b": TOO_FEW[:2]}) == "left out: ddp, fsdp on 1: needs two devices or more"
    assert refusal_line({"d": []}) == ""
