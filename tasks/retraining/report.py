"""The report of a retraining run: which models were due and why, the cost, the results, and what to inspect."""

import json
import os
import time
import urllib.parse
from base64 import b64encode
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from tenacity import Retrying, retry_if_result, stop_after_attempt, wait_chain, wait_fixed

from ringmaster.codec import SINCE_LATER, finite, to_json
from ringmaster.features import listed
from ringmaster.model_lineage.records import KEPT, PROMOTED
from ringmaster.tasks.planning.objectives import HOUR_S
from ringmaster.tasks.retraining.selection import day_text
from ringmaster.text import page_template

UNCHANGED, FAILED, LEFT = "unchanged", "failed", "left"  # the outcomes other than `PROMOTED` and `KEPT`
OUTCOME_TEXTS = {LEFT: "left for the next run"}
"""The display text of an outcome, where it differs from the outcome's name."""

# Reasons are in lists, which wrap on a narrow page; tables are cut off.
PAGE = page_template("""\
{% macro count(number, what) %}{{ number }} {{ what }}{{ "" if number == 1 else "s" }}{% endmacro %}
{% macro version(v, number, value) %}
{% if number is not none %}version {{ number }}\
{% if value is not none %}, {{ v.metric | markdown }} {{ "%.4g" % value }}{% endif %}{% endif %}
{% endmacro %}
{% macro gain(v) %}
{% if v.gain is finite %}{{ "%+.3g" % v.gain }}\
{% if v.gain_low is finite and v.gain_high is finite %} \
({{ "%+.3g to %+.3g" % (v.gain_low, v.gain_high) }}){% endif %}{% endif %}
{% endmacro %}
# Retraining of {{ run.name | markdown }}, {{ run.run_date }}

**{{ run.headline() }}**

Begun at {{ day(run.began_s) }} UTC{% if run.deadline_s is not none %}, to be over by {{ day(run.deadline_s) }} UTC\
{% endif %}{% if run.missed %}; {{ "one earlier run was" if run.missed == 1 else run.missed ~ " earlier runs were" }} \
missed, and what was not done then is due now{% endif %}.

## What was due

{% for v in run.model_results %}
- **{{ v.model | markdown }}** {{ "is due" if v.is_due else "is not" }}: \
{{ (v.why_due or "it could not be inspected") | markdown }}
{% endfor %}
{% if run.batch is not none or run.plan %}

## Plan and cost

{% if run.plan %}
- Planned: {{ count(run.plan.num_jobs, "job") }} in {{ "%.1f" % run.plan.makespan_s }} s\
{% if run.plan.num_groups is defined and run.plan.num_groups %}
, {{ run.plan.num_fused }} of them together in {{ count(run.plan.num_groups, "group") }}\
{% endif %}{% if run.plan.gap is not none %}
, at most {{ "%.1f" % (100 * run.plan.gap) }}% above the best plan with these runtimes{% endif %}.
{% endif %}
{% if run.batch is not none %}
- Trained in {{ "%.1f" % run.batch.makespan_s }} s.
{% endif %}
- Measured: {% if run.num_trials %}{{ count(run.num_trials, "trial") }} in {{ "%.1f" % run.profiling_s }} s, \
of what was not known yet{% else %}nothing{% endif %}.
- Cost: {{ "%.3g" % run.cost }}{% if run.budget is not none %} of {{ "%g" % run.budget }}{% endif %} \
{{ run.unit | markdown }}.
{% if run.was_cut_short %}
- The run was interrupted after its training, which is not in this cost.
{% endif %}
{% for model, why in run.left.items() %}
- **{{ model | markdown }}**: {{ why | markdown }}.
{% endfor %}
{% endif %}
{% if svg %}

![The plan](data:image/svg+xml;base64,{{ svg }})
{% endif %}
{% if run.gains %}

## What more devices would gain

{% for gain in run.gains %}
- {{ gain | markdown }}
{% endfor %}
{% endif %}

## Results

| model | | champion | challenger | gain | rows | serves now |
| --- | --- | --- | --- | --- | --- | --- |
{% for v in run.model_results %}
{% set outcome = outcome_texts.get(v.outcome, v.outcome) %}
| {{ v.model | markdown }} | {{ outcome if outcome == "unchanged" else "**" ~ outcome ~ "**" }} | \
{{ version(v, v.champion_version, v.champion_value) }} | \
{{ version(v, v.candidate_version, v.candidate_value) }} | {{ gain(v) }} | \
{{ "" if v.num_rows is none else v.num_rows }} | {{ "none" if v.serves is none else "version " ~ v.serves }} |
{% endfor %}

{% for v in run.model_results if v.why %}
- **{{ v.model | markdown }}** {{ outcome_texts.get(v.outcome, v.outcome) }}: {{ v.why | markdown }}
{% endfor %}
{% for v in run.model_results if v.notes %}
{% if loop.first %}

## To inspect

{% endif %}
{% for note in v.notes %}
- **{{ v.model | markdown }}**: {{ note | markdown }}
{% endfor %}
{% endfor %}
""")


@dataclass(frozen=True, kw_only=True)
class ModelResult:
    """The result of one model in a retraining run.

    why_due: why the model was due or not.
    metric: the metric by which versions are compared.
    outcome: "promoted"; "kept" if the candidate is not better; "unchanged" if there was no candidate; "left" if the run
        had no time or budget for the model; or "failed". The champion changes only with "promoted".
    why: the reason for the outcome.
    champion_version: before the run.
    is_waiting: whether the candidate waits for a person's approval.
    champion_value, candidate_value: `metric` of each on the same rows, or None if not measured.
    num_rows: the number of these rows; None if nothing was measured.
    gain: by how much the candidate is better, negative if it is worse; None without a champion.
    gain_low, gain_high: the 95 % confidence interval of the gain.
    notes: what users should inspect.
    """

    model: str
    is_due: bool
    why_due: str
    metric: str
    outcome: str = UNCHANGED
    why: str = ""
    champion_version: int | None = None
    is_waiting: bool = field(default=False, metadata=SINCE_LATER)
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
        row: dict[str, Any] = finite(to_json(self))
        return row

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

    @property
    def num_due(self) -> int:
        """The number of models that were due."""
        return sum(model_result.is_due for model_result in self.model_results)

    @property
    def _counts(self) -> dict[str, int]:
        """The number of models by outcome."""
        outcomes = [model_result.outcome for model_result in self.model_results]
        return {outcome: outcomes.count(outcome) for outcome in (PROMOTED, KEPT, FAILED, LEFT)}

    def headline(self) -> str:
        """Returns the results in one line."""
        reported = ", ".join(f"{num} {OUTCOME_TEXTS.get(o, o)}" for o, num in self._counts.items() if num)
        return f"{self.num_due} of {len(self.model_results)} models were due; {reported or 'nothing changed'}."

    def figures(self) -> dict[str, float]:
        """Returns the numbers by which runs can be compared."""
        counts = {f"num_{outcome}": num for outcome, num in self._counts.items()}
        return {"num_due": self.num_due, **counts, "num_trials": self.num_trials, "cost": self.cost}

    def markdown(self, *, with_picture: bool = True) -> str:
        """Returns the report as Markdown. with_picture: whether to include the plan's picture as a data URL."""
        picture = b64encode(self.svg.encode()).decode() if with_picture else ""
        return PAGE.render(run=self, outcome_texts=OUTCOME_TEXTS, day=day_text, svg=picture)

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


def cost_of_batch(
    batch: Mapping[str, Any], *, price_per_device_hour: float = 1.0, jobs: Collection[str] | None = None
) -> float:
    """Returns what a batch has cost, from the JSON form of its result.

    Where a feature of the batch counts money, that is its cost, else the device-hours of its segments times the price.

    jobs: counts these alone; they share the money by their device-hours.
    """
    rows = [job for job in batch["jobs"] if jobs is None or job["name"] in jobs]
    device_s = _device_s(rows)
    if (money := money_of_batch(batch)) is None:
        return device_s * price_per_device_hour / HOUR_S
    whole_s = _device_s(batch["jobs"])
    return money * device_s / whole_s if whole_s else 0.0


def money_of_batch(batch: Mapping[str, Any]) -> float | None:
    """Returns the money that a feature of a batch counts (the metric "money" of `RecordHook`s); None without any."""
    figures = (hook.batch_metrics(batch) for hook in listed("pages", "RECORD_HOOKS"))
    return next((each["money"] for each in figures if "money" in each), None)


def _device_s(rows: Iterable[Mapping[str, Any]]) -> float:
    # If a run was interrupted before a gang's jobs shared its cost, their stored segments lack `device_s`.
    segments = (segment for row in rows for segment in row["segments"])
    return float(sum(s["device_s"] if "device_s" in s else s["seconds"] * s["num_devices"] for s in segments))


TIMEOUT_S = 10.0
WAITS_S = (1.0, 5.0, 15.0)  # before each retry
MAY_PASS = (408, 425, 429)  # and all status codes from 500


def address_of(setting: str, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the URL of a webhook; `$NAME` represents the variable's value, since such addresses are secrets.

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
