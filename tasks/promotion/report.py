"""The report of a night: what was due and why, what came of it, and what was promoted or kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from techniques.values import to_json

PROMOTED, KEPT, UNCHANGED, FAILED = "promoted", "kept", "unchanged", "failed"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of one model in a night.

    why_due: why it was due or not. outcome: "promoted"; "kept", where the candidate is not better; "unchanged", where
    there was none; or "failed": in each but the first the champion stays what it was. why: of the outcome.
    champion_version: before the night. *_value: `metric` of each on the same held-out data, where it was measured.
    """

    model: str
    is_due: bool
    why_due: str
    metric: str
    outcome: str = UNCHANGED
    why: str = ""
    champion_version: int | None = None
    candidate_version: int | None = None
    champion_value: float | None = None
    candidate_value: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is not finite, which JSON lacks, is None."""
        row: dict[str, Any] = to_json(self)
        return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}


def markdown(name: str, verdicts: Sequence[Verdict], *, batch: Mapping[str, Any] | None) -> str:
    """The report as markdown. batch: the JSON form of the batch's result, None where nothing was trained."""
    num_due = sum(verdict.is_due for verdict in verdicts)
    counts = {outcome: sum(v.outcome == outcome for v in verdicts) for outcome in (PROMOTED, KEPT, FAILED)}
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) or "nothing changed"
    lines = [f"# Retraining of {name}", "", f"**{num_due} of {len(verdicts)} models were due; {told}.**", ""]
    if batch is not None:
        lines += [f"The batch took {batch['makespan_s']:.1f} s on its devices, after {batch['num_trials']} trials.", ""]
    lines += ["| model | due | what came of it |", "| --- | --- | --- |"]
    lines += [
        f"| {v.model} | {'yes' if v.is_due else 'no'}: {_cell(v.why_due)} | {_cell(_outcome(v))} |" for v in verdicts
    ]
    return "\n".join(lines)


def _outcome(verdict: Verdict) -> str:
    """What came of it, and which version serves now."""
    serving = verdict.candidate_version if verdict.outcome == PROMOTED else verdict.champion_version
    serves = "no version serves" if serving is None else f"version {serving} serves"
    return f"**{verdict.outcome}**; {serves}" + (f": {verdict.why}" if verdict.why else "")


def _cell(text: str) -> str:
    """Text that keeps to its cell of a table."""
    return " ".join(text.replace("|", "\\|").split())
