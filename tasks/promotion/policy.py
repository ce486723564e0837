"""When a challenger becomes the champion: a pure rule, and its reason in words."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tasks.evaluation.compare import better, gain


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether the challenger is promoted, and why, for a person."""

    promote: bool
    why: str


def decide(challenger: float, champion: float | None, *, metric: str, min_gain: float = 0.0) -> Decision:
    """Promotes a challenger that is better than the champion by `min_gain` at least; a first one needs no gain.

    challenger, champion: `metric` of each on the same held-out data; None where there is no champion yet. Nothing is
    ever promoted on a value that is not finite, the champion's included: then nobody knows which is better.
    """
    if not math.isfinite(challenger):
        return Decision(promote=False, why=f"its {metric} is {challenger}")
    if champion is None:
        return Decision(promote=True, why=f"the first one, with {metric} {challenger:.4g}")
    if not math.isfinite(champion):
        return Decision(promote=False, why=f"the champion's {metric} is {champion} on this data: look at the data")
    won = gain(challenger, champion, metric=metric)
    figures = f"{metric} {challenger:.4g} against {champion:.4g}"
    if better(challenger, champion, metric=metric, min_gain=min_gain):
        return Decision(promote=True, why=f"better: {figures}")
    if won > 0:
        return Decision(promote=False, why=f"better by less than {min_gain:g}: {figures}")
    return Decision(promote=False, why=f"not better: {figures}")
