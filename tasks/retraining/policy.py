"""The policy file, and the rules by which a challenger becomes the champion, as pure functions with their reasons."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Self, TypeVar

from pydantic import Field, model_validator

from ringmaster.errors import BatchFileError
from ringmaster.files import is_file
from ringmaster.findings import Finding, Location
from ringmaster.tasks.batch import yaml_sections
from ringmaster.tasks.batch.document import FileKind
from ringmaster.tasks.batch.references import Distinct, Metric, Name, Positive, Whole, wrong
from ringmaster.tasks.batch.sections import Section
from ringmaster.tasks.evaluation.examination import ALL, ExaminationResult, SliceMetric
from ringmaster.tasks.evaluation.suite import Suite, load_suite
from ringmaster.techniques.metric import metric_named
from ringmaster.techniques.metrics.latency import FAMILY

T = TypeVar("T")
Probability = Annotated[float, Field(gt=0, lt=1)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ApprovalEntry(Section):
    """A person's approval, requested in Prefect's UI."""

    timeout_s: Positive = Field(default=86_400.0, description="seconds to wait for the answer, such as 3600")


class LimitEntry(Section):
    """Bounds of a metric over all rows."""

    at_most: float | None = Field(default=None, description="the largest value allowed, such as 0.05")
    at_least: float | None = Field(default=None, description="the smallest value allowed, such as 0.9")

    @model_validator(mode="after")
    def _has_a_bound(self) -> Self:
        if self.at_most is None and self.at_least is None:
            raise wrong("has no bound", "give at_most, at_least, or both")
        return self

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest value allowed."""
        least = -math.inf if self.at_least is None else self.at_least
        return least, math.inf if self.at_most is None else self.at_most


class PolicyEntry(Section):
    """A whole policy file."""

    name: Name = Field(description="a name, such as careful")
    metric: Metric | None = Field(default=None, description="the metric that decides, such as accuracy")
    min_gain: Amount = Field(default=0.0, description="by how much a challenger must be better, such as 0.005")
    significance: Probability | None = Field(
        default=0.05, description="the chance of seeing such a gain where there is none must be below, such as 0.05"
    )
    max_loss: Amount | None = Field(default=None, description="the most that a slice may lose, such as 0.02")
    min_slice_rows: Whole = Field(default=20, description="the rows that a slice must have to be compared, such as 20")
    suites: Annotated[list[str], Distinct] = Field(
        default=[], description="files of slices, tests and assertions, such as [tests.yaml]"
    )
    limits: dict[Metric, LimitEntry] = Field(
        default={}, description="bounds of metrics, such as {latency/p99_s: {at_most: 0.05}}"
    )
    max_rows: Whole | None = Field(
        default=None,
        description="the most rows that are read, such as 5000; by default 2000 held-out rows, or all of compare_on",
    )
    approval: ApprovalEntry | None = Field(default=None, description="who must agree, such as {timeout_s: 3600}")


MAX_HELD_OUT = 2000
MORE_SLICES = "name a suite with slices, or leave max_loss out"


@dataclass(frozen=True, kw_only=True)
class PromotionPolicy:
    """The rules for the promotion of a challenger; all of them must hold.

    metric: the metric that decides; None means the model's own.
    min_gain: in the metric's unit.
    significance: the upper bound of the paired bootstrap's p-value; None for no such test.
    max_loss: the most that any slice of at least `min_slice_rows` rows may lose; None for any loss.
    limits: the least and the largest value allowed of metrics over all rows.
    suites: their tests and assertions must pass, and their slices are compared.
    max_rows: the most rows to score; None for `MAX_HELD_OUT` held-out rows, and all rows of data to compare on.
    approval_s: seconds to wait for a person's approval; None if none is needed.
    folder: the folder of the policy file.
    """

    name: str
    metric: str | None = None
    min_gain: float = 0.0
    significance: float | None = 0.05
    max_loss: float | None = None
    min_slice_rows: int = 20
    limits: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    suites: tuple[Suite, ...] = ()
    max_rows: int | None = None
    approval_s: float | None = None
    folder: Path = Path()

    @property
    def num_rows(self) -> int:
        """The most held-out rows to score."""
        return self.max_rows or MAX_HELD_OUT

    def broken_limits(self, figures: Mapping[str, float]) -> list[str]:
        """Returns the metrics whose values are known and beyond their limits."""
        return [name for name, value in figures.items() if value < self.limits[name][0] or value > self.limits[name][1]]


def load_policy(path: Path) -> PromotionPolicy:
    """Loads the policy of a YAML file. Raises BatchFileError with all faults in it and in the suites that it names."""
    suites: list[Suite] = []

    def rules(entry: PolicyEntry) -> Iterator[Finding]:
        remedy = "copy it there, name a file relative to the policy's folder, or leave suites out"
        for i, name in enumerate(entry.suites):
            suite, wrong = load_named(load_suite, path.parent, name, at=("suites", i), remedy=remedy)
            yield from wrong
            suites.extend([] if suite is None else [suite])
        if entry.max_loss is not None and len(suites) == len(entry.suites):
            if not any(suite.slices for suite in suites):
                yield Finding(("max_loss",), "requires slices, and no suite has any", MORE_SLICES)
        elif entry.max_loss is not None and not suites:
            yield Finding(("max_loss",), "requires the slices of a suite that cannot be read", MORE_SLICES)

    entry = yaml_sections.load_section(path, PolicyEntry, rules=rules, kind=FileKind.POLICY)
    return PromotionPolicy(
        name=entry.name,
        metric=entry.metric,
        min_gain=entry.min_gain,
        significance=entry.significance,
        max_loss=entry.max_loss,
        min_slice_rows=entry.min_slice_rows,
        limits={name: limit.ends for name, limit in entry.limits.items()},
        suites=tuple(suites),
        max_rows=entry.max_rows,
        approval_s=None if entry.approval is None else entry.approval.timeout_s,
        folder=path.parent.resolve(),
    )


def load_named(
    load: Callable[[Path], T], folder: Path, name: str, *, at: Location, remedy: str
) -> tuple[T | None, list[Finding]]:
    """Loads a file that another one names at a place; returns None and the faults where it cannot be loaded.

    remedy: what to do where there is no such file.
    """
    if not is_file(folder, name):
        return None, [Finding(at, f"there is no file {name!r} next to this one", remedy)]
    try:
        return load(folder / name), []
    except BatchFileError as error:
        places = ((f, f"{f.file}:{f.line or 1}: {f.place}".rstrip()) for f in error.faults)
        return None, [Finding(at, f"{place} {fault.message}", fault.remedy) for fault, place in places]


OF_POLICY = "policy "
"""What precedes the name of a policy where a decision names who made it."""
PLAIN_RULE = PromotionPolicy(name="rule", significance=None)
"""What decides without a policy file: a challenger that is better by the model's `min_gain` is promoted."""


@dataclass(frozen=True, kw_only=True)
class PromotionDecision:
    """Whether the challenger is promoted, with the reason for users.

    reasons: all reasons, and the comparison with the champion.
    compared: the metric over all rows, with that of the champion; None where a person decides, or it is not known.
    figures: the values of the metrics that the policy limits, as far as they are known, as `limited_value` has them.
    """

    promote: bool
    why: str
    reasons: tuple[str, ...] = ()
    compared: SliceMetric | None = None
    figures: Mapping[str, float] = field(default_factory=dict)


def decide_by(
    policy: PromotionPolicy,
    examined: Sequence[ExaminationResult],
    *,
    metric: str,
    is_first: bool,
    min_gain: float = 0.0,
) -> PromotionDecision:
    """Promotes a challenger that meets every rule of the policy; each broken rule is a reason.

    Nothing is promoted if a value is not finite, as the better one is unknown then.

    examined: examinations of the challenger, compared with the champion on the same rows: one for each suite of the
        policy, each with the metrics.
    metric: the model's metric, used if the policy names none.
    is_first: whether there is no champion to compare with.
    min_gain: the model's own minimum; the larger of it and the policy's counts.
    """
    metric = policy.metric or metric
    lines = [line for result in examined for line in result.measured if line.metric == metric]
    whole = next((line for line in lines if line.slice == ALL), None)
    reasons = [fault for result in examined for fault in result.faults]
    known = {line.metric: line for result in examined for line in result.measured if line.slice == ALL}
    reasons += _outside_limits(policy, known)
    for result in examined:
        reasons += [_failure_text(t.test, t.num_failures, t.num_cases, t.fault) for t in result.tests if not t.passed]
        reasons += [
            _failure_text(a.assertion, a.num_failures, a.num_rows, a.why) for a in result.assertions if not a.passed
        ]
    if whole is None:
        reasons.append(f"its {metric} is not known")
    elif not math.isfinite(whole.value):
        reasons.append(f"its {metric} is {whole.value} on {_rows(whole)}")
    elif not is_first:
        reasons += _against_champion(policy, whole, min_gain=max(min_gain, policy.min_gain))
        reasons += [_on_slice(line) for line in lines if _loses(policy, line)]
    is_promoted = not reasons
    if whole is not None and math.isfinite(whole.value):
        figures = comparison(whole)
        if not any(reason.startswith(figures) for reason in reasons):
            reasons.append(figures)
    reasons = list(dict.fromkeys(reasons))
    return PromotionDecision(
        promote=is_promoted,
        why="; ".join(reasons),
        reasons=tuple(reasons),
        compared=whole,
        figures={name: limited_value(known[name]) for name in policy.limits if name in known},
    )


def comparison(line: SliceMetric) -> str:
    """Returns a metric of a challenger, compared with the champion's where there is one, as a sentence.

    It has the number of rows, and the interval that contains the true difference with the probability `line.level`.
    """
    if line.other is None:
        interval = _interval(line, f"{line.low:.4g} to {line.high:.4g}", (line.low, line.high))
        return f"the first one, with {line.metric} {line.value:.4g}{interval} on {_rows(line)}"
    figures = f"on {_rows(line)}: {line.metric} {line.value:.4g} against {line.other:.4g}"
    gain, low, high = line.gain, line.gain_low, line.gain_high
    if gain is None or low is None or high is None or not math.isfinite(gain):
        return f"the models cannot be compared {figures}"
    how = "as good as the champion" if gain == 0 else f"{_direction(gain)} by {abs(gain):.3g}"
    if low * high >= 0 and gain != 0:  # the whole interval is on one side
        ends = sorted((abs(low), abs(high)))
        bounds = f"{ends[0]:.3g} to {ends[1]:.3g}"
    else:
        bounds = f"{abs(low):.3g} {_direction(low)} to {abs(high):.3g} {_direction(high)}"
    return f"the new model is {how}{_interval(line, bounds, (low, high))} {figures}"


def _rows(line: SliceMetric) -> str:
    return "1 row" if line.num_rows == 1 else f"{line.num_rows} rows"


def _direction(gain: float) -> str:
    return "better" if gain > 0 else "worse"


def _interval(line: SliceMetric, bounds: str, ends: tuple[float, float]) -> str:
    return f" ({100 * line.level:g} % interval {bounds})" if all(map(math.isfinite, ends)) else ""


def _against_champion(policy: PromotionPolicy, whole: SliceMetric, *, min_gain: float) -> Iterator[str]:
    if whole.gain is None or whole.p_better is None or not math.isfinite(whole.gain):
        yield f"the champion's {whole.metric} is {whole.other} on this data: inspect the data"
        return
    if whole.gain <= 0:
        yield comparison(whole)
    elif whole.gain < min_gain:
        yield f"{comparison(whole)}, which is less than the {min_gain:g} that is wanted"
    if whole.gain > 0 and policy.significance is not None and whole.p_better >= policy.significance:
        yield (
            f"it may be chance: of two equally good models, one is better by as much in {100 * whole.p_better:.2g} % "
            f"of such comparisons, and the policy allows less than {100 * policy.significance:g} %. To fix: compare on "
            "more rows"
        )


def limited_value(line: SliceMetric) -> float:
    """Returns what a limit holds for: of a latency, whose tail is few requests, the worse end of its interval."""
    if not line.metric.startswith(f"{FAMILY}/"):
        return line.value
    end = line.low if metric_named(line.metric).higher_is_better else line.high
    return end if math.isfinite(end) else line.value


def _outside_limits(policy: PromotionPolicy, known: Mapping[str, SliceMetric]) -> Iterator[str]:
    for metric, (least, most) in policy.limits.items():
        value = limited_value(known[metric]) if metric in known else math.nan
        if not least <= value <= most:
            bound = f"at most {most:g}" if value > most else f"at least {least:g}" if value < least else "a number"
            is_end = metric in known and value != known[metric].value
            of = f", the end of the interval around {known[metric].value:.4g}" if is_end else ""
            yield f"its {metric} is {value:.4g}{of}, and the policy allows {bound}"


def _loses(policy: PromotionPolicy, line: SliceMetric) -> bool:
    """Whether a slice that is large enough loses more than allowed."""
    if policy.max_loss is None or line.slice == ALL or line.num_rows < policy.min_slice_rows:
        return False
    return line.gain is None or not line.gain >= -policy.max_loss  # a gain that is NaN counts as a loss


def _on_slice(line: SliceMetric) -> str:
    gain = "an unknown amount" if line.gain is None or not math.isfinite(line.gain) else f"{-line.gain:.4g}"
    return f"loses {gain} of {line.metric} on {line.slice} ({line.num_rows} rows)"


def _failure_text(name: str, num_failures: int, num_cases: int, fault: str) -> str:
    return f"{name}: {fault}" if fault else f"{name}: {num_failures} of {num_cases} fail"
