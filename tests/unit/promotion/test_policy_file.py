"""Decisions by a policy: every rule, and all reasons at once."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ringmaster.errors import BatchFileError
from ringmaster.tasks.evaluation.examination import ExaminationResult, SliceMetric
from ringmaster.tasks.evaluation.model_assertions import AssertionResult
from ringmaster.tasks.evaluation.suite_tests import TestResult
from ringmaster.tasks.retraining.policy import PromotionPolicy, decide_by, load_policy

POLICY = PromotionPolicy(name="careful", min_gain=0.01, max_loss=0.02, min_slice_rows=20)
GOOD = SliceMetric(
    metric="accuracy", slice="all", num_rows=500, value=0.9, low=0.88, high=0.92, level=0.95,
    other=0.85, gain=0.05, gain_low=0.02, gain_high=0.08, p_better=0.001, p_worse=0.999,
)  # fmt: skip
FIGURES = "(95 % interval 0.02 to 0.08) on 500 rows: accuracy 0.9 against 0.85"


def decide(*lines, policy=POLICY, is_first=False, **more):
    return decide_by(policy, [ExaminationResult(measured=lines, **more)], metric="accuracy", is_first=is_first)


def sliced(gain, rows=50, name="class=3"):
    return replace(GOOD, slice=name, num_rows=rows, gain=gain)


def test_what_meets_every_rule_is_promoted():
    found = decide(GOOD, sliced(-0.01))
    assert found.promote
    assert found.why == f"the new model is better by 0.05 {FIGURES}"


LIMITED = replace(POLICY, limits={"latency/p99_s": (float("-inf"), 0.05), "f1": (0.8, float("inf"))})
QUICK, EXACT = (
    replace(GOOD, metric="latency/p99_s", value=0.04, low=0.03, high=0.05),
    replace(GOOD, metric="f1", value=0.85),
)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([QUICK, EXACT], ""),
        ([replace(QUICK, high=0.06), EXACT], "its latency/p99_s is 0.06, the end of the interval around 0.04, and the"),
        ([replace(QUICK, value=0.06, high=float("nan")), EXACT], "its latency/p99_s is 0.06, and the policy allows at"),
        ([QUICK, replace(EXACT, value=0.7)], "its f1 is 0.7, and the policy allows at least 0.8"),
        ([QUICK], "its f1 is nan, and the policy allows a number"),
        ([QUICK, replace(EXACT, slice="class=3")], "its f1 is nan"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_limits_of_metrics_hold_for_the_first_model_too(lines, told, is_first):
    found = decide(GOOD, *lines, policy=LIMITED, is_first=is_first)
    assert found.promote == (not told) and told in found.why


def test_limits_are_read_from_the_file(tmp_path):
    file = tmp_path / "policy.yaml"
    file.write_text("name: quick\nlimits: {latency/p99_s: {at_most: 0.05}, accuracy: {at_least: 0.9, at_most: 1.0}}\n")
    assert load_policy(file).limits == {"latency/p99_s": (float("-inf"), 0.05), "accuracy": (0.9, 1.0)}
    file.write_text("name: quick\nlimits: {accuracy: {}, nonsense: {at_most: 1}}\n")
    with pytest.raises(BatchFileError) as error:
        load_policy(file)
    assert "has no bound. To fix: give at_most" in str(error.value) and "nonsense" in str(error.value)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([replace(GOOD, gain=-0.01, p_better=0.9)], "worse by 0.01"),
        ([replace(GOOD, gain=0.005)], "which is less than the 0.01 that is wanted"),
        ([replace(GOOD, p_better=0.05)], "one is better by as much in 5 % of such comparisons"),
        ([GOOD, sliced(-0.021)], "loses 0.021 of accuracy on class=3 (50 rows)"),
        ([GOOD, sliced(float("nan"))], "an unknown amount"),
        ([replace(GOOD, value=float("nan"))], "its accuracy is nan"),
        ([replace(GOOD, gain=float("nan"), other=float("nan"))], "inspect the data"),
        ([replace(GOOD, metric="loss")], "its accuracy is not known"),
        ([], "its accuracy is not known"),
    ],
)
def test_each_rule_keeps_the_champion(lines, told):
    found = decide(*lines)
    assert not found.promote
    assert told in found.why


def test_slices_that_are_too_small_are_not_judged():
    assert decide(GOOD, sliced(-0.5, rows=19)).promote
    assert not decide(GOOD, sliced(-0.5, rows=20)).promote


def test_slices_of_the_same_name_in_two_suites_are_both_judged():
    examined = [
        ExaminationResult(measured=[GOOD, sliced(-0.3)]),
        ExaminationResult(measured=[GOOD, sliced(0.1, rows=60)]),
    ]
    for found in (examined, examined[::-1]):
        decision = decide_by(POLICY, found, metric="accuracy", is_first=False)
        figures = f"the new model is better by 0.05 {FIGURES}"
        assert decision.reasons == ("loses 0.3 of accuracy on class=3 (50 rows)", figures)


def test_all_reasons_are_told():
    found = decide(
        replace(GOOD, gain=-0.1, p_better=0.99),
        sliced(-0.3),
        sliced(-0.2, name="class=7"),
        tests=(TestResult(test="typos", kind="invariance", num_cases=10, num_failures=4),),
        assertions=(
            AssertionResult(assertion="sane", kind="finite", num_rows=9, num_failures=1, max_failures=0, passed=False),
        ),
        faults=("the other cannot be scored: it broke",),
    )
    assert found.reasons == (
        "the other cannot be scored: it broke",
        "typos: 4 of 10 fail",
        "sane: 1 of 9 fail",
        f"the new model is worse by 0.1 {FIGURES}",
        "loses 0.3 of accuracy on class=3 (50 rows)",
        "loses 0.2 of accuracy on class=7 (50 rows)",
    )


def test_the_first_one_need_not_win_but_must_pass():
    first = replace(GOOD, other=None, gain=None, p_better=None)
    assert decide(first, is_first=True).promote
    broken = TestResult(test="typos", kind="invariance", fault="it broke")
    reasons = decide(first, is_first=True, tests=(broken,)).reasons
    assert reasons[0] == "typos: it broke"
    assert reasons[1].startswith("the first one, with accuracy 0.9")


def test_a_policy_names_its_own_metric_and_may_do_without_a_test_of_chance():
    loss = replace(GOOD, metric="loss", p_better=0.4)
    assert decide(loss, policy=replace(POLICY, metric="loss", significance=None)).promote


def write(folder, text):
    (folder / "policy.yaml").write_text(text)
    return folder / "policy.yaml"


def test_a_file_says_a_policy_with_its_suites(tmp_path):
    (tmp_path / "tests.yaml").write_text("name: t\nslices: [{name: class, column: labels}]\n")
    policy = load_policy(
        write(tmp_path, "name: careful\nmax_loss: 0.02\nsuites: [tests.yaml]\napproval: {timeout_s: 60}\n")
    )
    assert (policy.max_loss, policy.significance, policy.approval_s) == (0.02, 0.05, 60.0)
    assert [suite.name for suite in policy.suites] == ["t"]


def test_all_faults_of_a_file_are_told(tmp_path):
    with pytest.raises(BatchFileError) as raised:
        load_policy(write(tmp_path, "name: x\nmin_gain: -1\nsignificance: 2\nmetrics: loss\n"))
    assert {(f.line, f.place) for f in raised.value.faults} == {(2, "min_gain"), (3, "significance"), (4, "metrics")}
    with pytest.raises(BatchFileError) as raised:
        load_policy(write(tmp_path, "name: x\nmin_gain: -1\nmax_loss: 0.1\nsuites: [none.yaml]\n"))
    assert [f.place for f in raised.value.faults] == ["min_gain", "max_loss", "suites[0]"]
    (tmp_path / "tests.yaml").write_text("name: t\nslices: [{name: class}]\n")
    with pytest.raises(BatchFileError) as raised:
        load_policy(write(tmp_path, "name: x\nmin_gain: -1\nsuites: [tests.yaml, none.yaml]\n"))
    assert [f.place for f in raised.value.faults] == ["min_gain", "suites[0]", "suites[1]"]
    (tmp_path / "tests.yaml").write_text("name: t\nassertions: [{name: sane, finite: [loss]}]\n")
    with pytest.raises(BatchFileError, match="no suite has any"):
        load_policy(write(tmp_path, "name: x\nmax_loss: 0.1\nsuites: [tests.yaml]\n"))
    with pytest.raises(BatchFileError, match="no suite has any"):
        load_policy(write(tmp_path, "name: x\nmax_loss: 0.1\n"))


def test_an_example_that_is_copied_alone_is_refused_once_with_all_that_it_needs(tmp_path):
    shutil.copy(Path(__file__).parents[3] / "examples" / "policy.yaml", tmp_path)
    with pytest.raises(BatchFileError) as raised:
        load_policy(tmp_path / "policy.yaml")
    assert [fault.place for fault in raised.value.faults] == ["max_loss", "suites[0]"]
    text = (tmp_path / "policy.yaml").read_text()
    kept = [line for line in text.splitlines() if not line.startswith(("max_loss", "suites"))]
    (tmp_path / "policy.yaml").write_text("\n".join(kept))
    assert load_policy(tmp_path / "policy.yaml").suites == ()


def test_the_examples_are_right():
    examples = Path(__file__).parents[3] / "examples"
    policy = load_policy(examples / "policy.yaml")
    assert [test.name for test in policy.suites[0].tests] == ["known", "noisy", "covered"]
