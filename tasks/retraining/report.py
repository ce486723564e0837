"""The report of a night, on one page: what was due and why, what it cost, what came of it, and what to look at."""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringmaster.tasks.planning.terms import HOUR_S
from ringmaster.tasks.retraining.dates import day_text
from ringmaster.techniques.values import to_json

PROMOTED, KEPT, UNCHANGED, FAILED, LEFT = "promoted", "kept", "unchanged", "failed", "left"
SAID = {LEFT: "left for tomorrow"}
"""How an outcome is called for people, where not by its own name."""
MARKS = re.compile(r"([\\`*_<>\[\]|#])")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of one model in a night.

    why_due: why it was due or not. outcome: "promoted"; "kept", where the candidate is not better; "unchanged", where
    there was none; "left", where the night was too short for it; or "failed": in each but the first the champion stays
    what it was. why: of the outcome. champion_version: before the night. *_value: `metric` of each on the same held-out
    data, where it was measured. notes: what a person should look at.
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
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is not finite, which JSON lacks, is None."""
        row: dict[str, Any] = to_json(self)
        return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}

    @property
    def serves(self) -> int | None:
        """The version that serves after the night."""
        return self.candidate_version if self.outcome == PROMOTED else self.champion_version


@dataclass(frozen=True, kw_only=True)
class NightReport:
    """A night. began_s, deadline_s: in seconds since the epoch. missed: nights before it that were not held.

    batch: the JSON form of the batch's result, None where nothing was trained. plan: figures of the plan that the
    night's models were chosen by, none where there was none. svg: a picture of it. cost: of the devices, in `unit`, of
    training and of measuring; budget: of that. left: why a model's sweep was left out although it was trained itself.
    num_trials, profiling_s: of measuring what was not known. was_cut_short: whether an earlier process of this night
    has trained what this one found, whose seconds nobody knows any more.
    """

    name: str
    night: str
    verdicts: tuple[Verdict, ...]
    began_s: float = 0.0
    deadline_s: float | None = None
    missed: int = 0
    batch: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    svg: str = ""
    cost: float = 0.0
    unit: str = "device-hours"
    budget: float | None = None
    num_trials: int = 0
    profiling_s: float = 0.0
    left: Mapping[str, str] = field(default_factory=dict)
    was_cut_short: bool = False

    def headline(self) -> str:
        """What came of it in one line."""
        counts = {outcome: self._num(outcome) for outcome in (PROMOTED, KEPT, FAILED, LEFT)}
        told = ", ".join(f"{count} {SAID.get(o, o)}" for o, count in counts.items() if count) or "nothing changed"
        return f"{self.num_due} of {len(self.verdicts)} models were due; {told}."

    @property
    def num_due(self) -> int:
        """How many models were due."""
        return sum(verdict.is_due for verdict in self.verdicts)

    def figures(self) -> dict[str, float]:
        """Numbers by which nights can be compared."""
        counts = {f"num_{outcome}": self._num(outcome) for outcome in (PROMOTED, KEPT, FAILED, LEFT)}
        return {"num_due": self.num_due, **counts, "num_trials": self.num_trials, "cost": self.cost}

    def _num(self, outcome: str) -> int:
        return sum(verdict.outcome == outcome for verdict in self.verdicts)

    def markdown(self, *, with_picture: bool = True) -> str:
        """The page. with_picture: the plan's, as an address that holds it."""
        lines = [f"# Retraining of {self.name}, {self.night}", "", f"**{self.headline()}**", "", *self._hours(), ""]
        lines += ["## What was due", ""]  # lists, whose lines are broken where a page is narrow; tables are cut off
        lines += [f"- **{v.model}** {'is due' if v.is_due else 'is not'}: {_line(v.why_due)}" for v in self.verdicts]
        if self.batch is not None or self.plan:
            lines += ["", "## Plan and cost", "", *self._cost()]
        if with_picture and self.svg:
            lines += ["", f"![The plan](data:image/svg+xml;base64,{b64encode(self.svg.encode()).decode()})"]
        lines += ["", "## What came of it", ""]
        lines += ["| model | | champion | challenger | serves now |", "| --- | --- | --- | --- | --- |"]
        lines += [_outcome(verdict) for verdict in self.verdicts]
        lines += [
            "",
            *(f"- **{v.model}** {SAID.get(v.outcome, v.outcome)}: {_line(v.why)}" for v in self.verdicts if v.why),
        ]
        if notes := [f"- **{v.model}**: {_line(note)}" for v in self.verdicts for note in v.notes]:
            lines += ["", "## To look at", "", *notes]
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the picture and the batch."""
        return {
            "name": self.name,
            "night": self.night,
            "headline": self.headline(),
            "models": [verdict.to_json() for verdict in self.verdicts],
            "plan": dict(self.plan),
            "cost": self.cost,
            "unit": self.unit,
            "budget": self.budget,
            "num_trials": self.num_trials,
            "missed": self.missed,
        }

    def _hours(self) -> Iterator[str]:
        said = f"Begun at {day_text(self.began_s)} UTC"
        if self.deadline_s is not None:
            said += f", to be over by {day_text(self.deadline_s)} UTC"
        if self.missed:
            nights = "one night before it was" if self.missed == 1 else f"{self.missed} nights before it were"
            said += f"; {nights} missed, and what was not done then is due now"
        yield f"{said}."

    def _cost(self) -> Iterator[str]:
        if self.plan:
            gap = self.plan["gap"]
            best = "" if gap is None else f", at most {gap:.1%} above the best possible plan"
            fused = ""
            if num_groups := self.plan.get("num_groups"):  # nights that were planned without say nothing of it
                fused = f", {self.plan['num_fused']} of them together in {_count(num_groups, 'group')}"
            yield f"- Planned: {_count(self.plan['num_jobs'], 'job')} in {self.plan['makespan_s']:.1f} s{fused}{best}."
        if self.batch is not None:
            yield f"- Trained in {self.batch['makespan_s']:.1f} s."
        trials = f"{_count(self.num_trials, 'trial')} in {self.profiling_s:.1f} s, of what was not known yet"
        yield f"- Measured: {trials if self.num_trials else 'nothing'}."
        budget = "" if self.budget is None else f" of {self.budget:g}"
        yield f"- Cost: {self.cost:.3g}{budget} {self.unit}."
        if self.was_cut_short:
            yield "- The night was cut short after its training, which is not in this cost."
        yield from (f"- **{model}**: {_line(why)}." for model, why in self.left.items())


def cost_of_batch(batch: Mapping[str, Any], *, price_per_device_hour: float = 1.0) -> float:
    """What the devices cost that a batch's segments had, by its result's JSON form."""
    # A night that was cut short before a gang's jobs shared its cost has kept their segments without `device_s`.
    device_s = sum(
        s["device_s"] if "device_s" in s else s["seconds"] * s["num_devices"]
        for job in batch["jobs"]
        for s in job["segments"]
    )
    return float(device_s * price_per_device_hour / HOUR_S)


def _outcome(v: Verdict) -> str:
    said = f"**{SAID.get(v.outcome, v.outcome)}**" if v.outcome != UNCHANGED else UNCHANGED
    serves = "none" if v.serves is None else f"version {v.serves}"
    champion = _value(v, v.champion_version, v.champion_value)
    challenger = _value(v, v.candidate_version, v.candidate_value)
    return f"| {v.model} | {said} | {champion} | {challenger} | {serves} |"


def _value(v: Verdict, version: int | None, value: float | None) -> str:
    if version is None:
        return ""
    return f"version {version}" + ("" if value is None else f", {v.metric} {value:.4g}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _line(text: str) -> str:
    """Text that keeps to its line, and says what it says: no sign of it is one of markdown's."""
    return " ".join(MARKS.sub(r"\\\1", text).split())
