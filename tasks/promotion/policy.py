"""The rules by which a challenger becomes the champion, as pure functions that also return their reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ringmaster.tasks.evaluation.compare import better, gain
from ringmaster.tasks.evaluation.examination import Examined
from ringmaster.tasks.evaluation.slices import ALL, Measured
from ringmaster.tasks.promotion.policy_file import Policy


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether the challenger is promoted, with the reason for people. reasons: all reasons, if a policy has decided."""

    promote: bool
    why: str
    reasons: tuple[str, ...] = ()


def decide(challenger: float, champion: float | None, *, metric: str, min_gain: float = 0.0) -> Decision:
    """Promotes a challenger that is better than the champion by at least `min_gain`; the first one needs no gain.

    challenger, champion: the value of `metric` on the same held-out data; champion is None if there is none yet.
    Nothing is promoted if either value is not finite, as the better one is unknown then.
    """
    if not math.isfinite(challenger):
        return Decision(promote=False, why=f"its {metric} is {challenger}")
    if champion is None:
        return Decision(promote=True, why=f"the first one, with {metric} {challenger:.4g}")
    if not math.isfinite(champion):
        return Decision(promote=False, why=f"the champion's {metric} is {champion} on this data: inspect the data")
    won = gain(challenger, champion, metric=metric)
    figures = f"{metric} {challenger:.4g} against {champion:.4g}"
    if better(challenger, champion, metric=metric, min_gain=min_gain):
        return Decision(promote=True, why=f"better: {figures}")
    if won > 0:
        return Decision(promote=False, why=f"better by less than {min_gain:g}: {figures}")
    return Decision(promote=False, why=f"not better: {figures}")


def decide_by(
    policy: Policy, examined: Sequence[Examined], *, metric: str, is_first: bool, min_gain: float = 0.0
) -> Decision:
    """Promotes a challenger that meets every rule of the policy; each broken rule is a reason.

    examined: examinations of the challenger, compared with the champion on the same rows: one for each suite of the
        policy, each with the metrics.
    metric: the model's metric, used if the policy names none.
    is_first: whether there is no champion to compare with.
    min_gain: the model's own minimum; the larger of it and the policy's counts.
    """
    metric = policy.metric or metric
    lines = [line for found in examined for line in found.measured if line.metric == metric]
    whole = next((line for line in lines if line.slice == ALL), None)
    reasons = [fault for found in examined for fault in found.faults]
    for found in examined:
        reasons += [_said(t.test, t.num_failures, t.num_cases, t.fault) for t in found.tests if not t.passed]
        reasons += [_said(a.assertion, a.num_failures, a.num_rows, a.why) for a in found.assertions if not a.passed]
    if whole is None:
        reasons.append(f"its {metric} is not known")
    elif not math.isfinite(whole.value):
        reasons.append(f"its {metric} is {whole.value}")
    elif not is_first:
        reasons += _against_champion(policy, whole, min_gain=max(min_gain, policy.min_gain))
        reasons += [_on_slice(line) for line in lines if _loses(policy, line)]
    reasons = list(dict.fromkeys(reasons))
    if reasons:
        return Decision(promote=False, why="; ".join(reasons), reasons=tuple(reasons))
    assert whole is not None, "a metric that is not known is a reason"
    figures = f"{metric} {whole.value:.4g}" + ("" if whole.other is None else f" against {whole.other:.4g}")
    why = f"the first one, with {figures}" if is_first else f"better: {figures}, p {whole.p_better:.2g}"
    return Decision(promote=True, why=why, reasons=(why,))


def _against_champion(policy: Policy, whole: Measured, *, min_gain: float) -> Iterator[str]:
    if whole.gain is None or whole.p_better is None or not math.isfinite(whole.gain):
        yield f"the champion's {whole.metric} is {whole.other} on this data: inspect the data"
        return
    figures = f"{whole.metric} {whole.value:.4g} against {whole.other:.4g}"
    if whole.gain <= 0:
        yield f"not better: {figures}"
    elif whole.gain < min_gain:
        yield f"better by less than {min_gain:g}: {figures}"
    if policy.significance is not None and whole.p_better >= policy.significance:
        yield f"it may be chance: p {whole.p_better:.2g} that there is no gain, not below {policy.significance:g}"


def _loses(policy: Policy, line: Measured) -> bool:
    """Whether a slice that is large enough loses more than allowed."""
    if policy.max_loss is None or line.slice == ALL or line.num_rows < policy.min_slice_rows:
        return False
    return line.gain is None or not line.gain >= -policy.max_loss  # a gain that is NaN counts as a loss


def _on_slice(line: Measured) -> str:
    gain = "an unknown amount" if line.gain is None or not math.isfinite(line.gain) else f"{-line.gain:.4g}"
    return f"loses {gain} of {line.metric} on {line.slice} ({line.num_rows} rows)"


def _said(name: str, num_failures: int, num_cases: int, fault: str) -> str:
    return f"{name}: {fault}" if fault else f"{name}: {num_failures} of {num_cases} fail"
