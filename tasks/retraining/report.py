"""The report of a retraining run: which models were due and why, the cost, the results, and what to inspect."""

import json
import math
import os
import time
import urllib.parse
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from tenacity import Retrying, retry_if_result, stop_after_attempt, wait_chain, wait_fixed

from ringmaster.codec import to_json
from ringmaster.tasks.planning.objectives import HOUR_S
from ringmaster.tasks.planning.whatif.answers import TITLE as GAINS_TITLE
from ringmaster.tasks.retraining.selection import day_text
from ringmaster.text import markdown

PROMOTED, KEPT, UNCHANGED, FAILED, LEFT = "promoted", "kept", "unchanged", "failed", "left"
OUTCOME_TEXTS = {LEFT: "left for the next run"}
"""The display text of an outcome, where it differs from the outcome's name."""


@dataclass(frozen=True, kw_only=True)
class ModelResult:
    """The result of one model in a retraining run.

    why_due: why the model was due or not.
    metric: the metric by which versions are compared.
    outcome: "promoted"; "kept" if the candidate is not better; "unchanged" if there was no candidate; "left" if the run
        had no time or budget for the model; or "failed". The champion changes only with "promoted".
    why: the reason for the outcome.
    champion_version: before the run.
    champion_value, candidate_value: `metric` of each on the same rows, or None if not measured.
    num_rows: the number of these rows; None if nothing was measured.
    gain: by how much the candidate is better, negative if it is worse; None without a champion.
    gain_low, gain_high: the 95 % confidence interval of the gain.
    notes: what people should inspect.
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
    num_rows: int | None = None
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns plain values; values that are not finite, which JSON lacks, become None."""
        row: dict[str, Any] = to_json(self)
        return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}

    @property
    def serves(self) -> int | None:
        """The version that serves after the run."""
        return self.candidate_version if self.outcome == PROMOTED else self.champion_version


@dataclass(frozen=True, kw_only=True)
class RetrainingReport:
    """A retraining run.

    began_s, deadline_s: in seconds since the epoch.
    missed: the number of scheduled runs before this one that did not take place.
    batch: the JSON form of the batch's result, or None if nothing was trained.
    plan: figures of the plan by which the models were selected; empty if there was none.
    svg: a picture of the plan.
    gains: what more devices would have gained, in sentences.
    cost: of the devices for training and profiling, in `unit`; budget: the limit of the cost.
    num_trials, profiling_s: of the profiling in this run.
    left: by model, why its sweep was left out although the model itself was trained.
    was_cut_short: whether an earlier, interrupted process of this run did the training; its seconds are unknown.
    """

    name: str
    run_date: str
    model_results: tuple[ModelResult, ...]
    began_s: float = 0.0
    deadline_s: float | None = None
    missed: int = 0
    batch: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    svg: str = ""
    gains: Sequence[str] = ()
    cost: float = 0.0
    unit: str = "device-hours"
    budget: float | None = None
    num_trials: int = 0
    profiling_s: float = 0.0
    left: Mapping[str, str] = field(default_factory=dict)
    was_cut_short: bool = False

    def headline(self) -> str:
        """Returns the results in one line."""
        counts = {outcome: self._num(outcome) for outcome in (PROMOTED, KEPT, FAILED, LEFT)}
        reported = (
            ", ".join(f"{count} {OUTCOME_TEXTS.get(o, o)}" for o, count in counts.items() if count) or "nothing changed"
        )
        return f"{self.num_due} of {len(self.model_results)} models were due; {reported}."

    @property
    def num_due(self) -> int:
        """The number of models that were due."""
        return sum(model_result.is_due for model_result in self.model_results)

    def figures(self) -> dict[str, float]:
        """Returns the numbers by which runs can be compared."""
        counts = {f"num_{outcome}": self._num(outcome) for outcome in (PROMOTED, KEPT, FAILED, LEFT)}
        return {"num_due": self.num_due, **counts, "num_trials": self.num_trials, "cost": self.cost}

    def _num(self, outcome: str) -> int:
        return sum(model_result.outcome == outcome for model_result in self.model_results)

    def markdown(self, *, with_picture: bool = True) -> str:
        """Returns the report as Markdown. with_picture: whether to include the plan's picture as a data URL."""
        lines = [
            f"# Retraining of {markdown(self.name)}, {self.run_date}",
            "",
            f"**{self.headline()}**",
            "",
            *self._hours(),
            "",
        ]
        lines += ["## What was due", ""]  # lists wrap on a narrow page, tables are cut off
        lines += [
            f"- **{markdown(v.model)}** {'is due' if v.is_due else 'is not'}: {markdown(v.why_due)}"
            for v in self.model_results
        ]
        if self.batch is not None or self.plan:
            lines += ["", "## Plan and cost", "", *self._cost()]
        if with_picture and self.svg:
            lines += ["", f"![The plan](data:image/svg+xml;base64,{b64encode(self.svg.encode()).decode()})"]
        if self.gains:
            lines += ["", f"## {GAINS_TITLE}", "", *(f"- {markdown(value)}" for value in self.gains)]
        lines += ["", "## Results", ""]
        lines += ["| model | | champion | challenger | gain | rows | serves now |", "| --- " * 7 + "|"]
        lines += [_outcome(model_result) for model_result in self.model_results]
        lines += [
            "",
            *(
                f"- **{markdown(v.model)}** {OUTCOME_TEXTS.get(v.outcome, v.outcome)}: {markdown(v.why)}"
                for v in self.model_results
                if v.why
            ),
        ]
        if notes := [f"- **{markdown(v.model)}**: {markdown(note)}" for v in self.model_results for note in v.notes]:
            lines += ["", "## To inspect", "", *notes]
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, without the picture and the batch."""
        return {
            "name": self.name,
            "night": self.run_date,
            "headline": self.headline(),
            "models": [model_result.to_json() for model_result in self.model_results],
            "plan": dict(self.plan),
            "cost": self.cost,
            "unit": self.unit,
            "budget": self.budget,
            "num_trials": self.num_trials,
            "missed": self.missed,
        }

    def _hours(self) -> Iterator[str]:
        text = f"Begun at {day_text(self.began_s)} UTC"
        if self.deadline_s is not None:
            text += f", to be over by {day_text(self.deadline_s)} UTC"
        if self.missed:
            nights = "one earlier run was" if self.missed == 1 else f"{self.missed} earlier runs were"
            text += f"; {nights} missed, and what was not done then is due now"
        yield f"{text}."

    def _cost(self) -> Iterator[str]:
        if self.plan:
            gap = self.plan["gap"]
            best = "" if gap is None else f", at most {gap:.1%} above the best plan with these runtimes"
            fused = ""
            if num_groups := self.plan.get("num_groups"):  # plans without groups lack the key
                fused = f", {self.plan['num_fused']} of them together in {_count(num_groups, 'group')}"
            yield f"- Planned: {_count(self.plan['num_jobs'], 'job')} in {self.plan['makespan_s']:.1f} s{fused}{best}."
        if self.batch is not None:
            yield f"- Trained in {self.batch['makespan_s']:.1f} s."
        trials = f"{_count(self.num_trials, 'trial')} in {self.profiling_s:.1f} s, of what was not known yet"
        yield f"- Measured: {trials if self.num_trials else 'nothing'}."
        budget = "" if self.budget is None else f" of {self.budget:g}"
        yield f"- Cost: {self.cost:.3g}{budget} {markdown(self.unit)}."
        if self.was_cut_short:
            yield "- The run was interrupted after its training, which is not in this cost."
        yield from (f"- **{markdown(model)}**: {markdown(why)}." for model, why in self.left.items())


def cost_of_batch(batch: Mapping[str, Any], *, price_per_device_hour: float = 1.0) -> float:
    """Returns the cost of the devices that a batch's segments used, from the JSON form of its result."""
    # If a run was interrupted before a gang's jobs shared its cost, their stored segments lack `device_s`.
    device_s = sum(
        s["device_s"] if "device_s" in s else s["seconds"] * s["num_devices"]
        for job in batch["jobs"]
        for s in job["segments"]
    )
    return float(device_s * price_per_device_hour / HOUR_S)


def _outcome(v: ModelResult) -> str:
    text = f"**{OUTCOME_TEXTS.get(v.outcome, v.outcome)}**" if v.outcome != UNCHANGED else UNCHANGED
    serves = "none" if v.serves is None else f"version {v.serves}"
    champion = _value(v, v.champion_version, v.champion_value)
    challenger = _value(v, v.candidate_version, v.candidate_value)
    rows = "" if v.num_rows is None else str(v.num_rows)
    return f"| {markdown(v.model)} | {text} | {champion} | {challenger} | {_gain(v)} | {rows} | {serves} |"


def _gain(v: ModelResult) -> str:
    if v.gain is None or not math.isfinite(v.gain):
        return ""
    known = v.gain_low is not None and v.gain_high is not None and math.isfinite(v.gain_low + v.gain_high)
    return f"{v.gain:+.3g}" + (f" ({v.gain_low:+.3g} to {v.gain_high:+.3g})" if known else "")


def _value(v: ModelResult, version: int | None, value: float | None) -> str:
    if version is None:
        return ""
    return f"version {version}" + ("" if value is None else f", {markdown(v.metric)} {value:.4g}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


TIMEOUT_S = 10.0
WAITS_S = (1.0, 5.0, 15.0)  # before each retry
MAY_PASS = (408, 425, 429)  # and all status codes from 500


def address_of(setting: str, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the URL of a webhook; `$NAME` stands for the variable's value, since such addresses are secrets.

    Raises ValueError if it is not an http or https address.
    """
    url = environment.get(setting[1:], "").strip() if setting.startswith("$") else setting
    if not url:
        raise ValueError(f"the environment has no {setting[1:]}, which names the webhook. To fix: export it")
    if not _is_address(url):
        raise ValueError(f"a webhook is an http or https address, {setting} is none")
    return url


def _is_address(url: str) -> bool:
    """Whether requests can be sent to the URL. Without the check, invalid characters would fail only at delivery."""
    try:
        parts = urllib.parse.urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0  # a port that is not a number raises ValueError
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and has_host and url.isascii() and url.isprintable() and " " not in url


def post(
    url: str,
    content: Mapping[str, Any],
    *,
    key: str,
    waits_s: Sequence[float] = WAITS_S,
    wait: Callable[[float], None] = time.sleep,
) -> str:
    """Posts `content` as JSON, with a retry after each of `waits_s` if the failure may be transient.

    key: identifies the message in the header `Idempotency-Key`; a slow receiver may get the message twice.
    wait: waits for a number of seconds.

    Returns why delivery failed, or "" on success. A fault of the receiver never raises.
    """
    headers = {"Content-Type": "application/json", "Idempotency-Key": key, "User-Agent": "ringmaster"}
    num_attempts = 1 + len(waits_s)
    retrying = Retrying(
        retry=retry_if_result(lambda attempt: attempt.may_pass),
        wait=wait_chain(*map(wait_fixed, waits_s)),
        stop=stop_after_attempt(num_attempts),
        sleep=wait,
        retry_error_callback=lambda state: state.outcome and state.outcome.result(),
    )
    last = retrying(_attempt, url, json.dumps(content, allow_nan=False), headers)
    return f"{last.fault}, {num_attempts} times" if last.may_pass else last.fault


@dataclass(frozen=True)
class _Attempt:
    """The outcome of one attempt: the fault or "", and whether a retry may help.

    The fault does not contain the address, which may be a secret.
    """

    fault: str = ""
    may_pass: bool = False


def _attempt(url: str, content: str, headers: Mapping[str, str]) -> _Attempt:
    try:
        # A redirect is not followed: the POST would become a GET without the report, and count as delivered.
        with httpx.stream("POST", url, content=content, headers=headers, timeout=TIMEOUT_S) as answer:
            status, reason = answer.status_code, answer.reason_phrase
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return _Attempt(f"the webhook cannot be reached: {type(error).__name__}: {error}", may_pass=True)
    if answer.is_success:
        return _Attempt()
    return _Attempt(f"the webhook answers {status} {reason}", may_pass=status in MAY_PASS or status >= 500)
