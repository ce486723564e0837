"""Records of promotion decisions: a tag on each model version, and a table on the run that made the version."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ringmaster.codec import from_json, to_json
from ringmaster.errors import LedgerError
from ringmaster.model_lineage import Ledger, ModelRecord

TAG = "ringmaster.decision"
TABLE = "promotion/decisions.json"
PROMOTED, KEPT, ROLLED_BACK, WAITING = "promoted", "kept", "rolled back", "waiting"
TAG_CHARACTERS = 5000  # MLflow's limit for a tag of a version


@dataclass(frozen=True, kw_only=True)
class DecisionRecord:
    """A decision about one version.

    outcome: "promoted", "kept", "rolled back" or "waiting" (for a person).
    champion_before: the version that served until then.
    who: the decider, a policy's name or a person.
    at: the time of the decision.
    """

    version: int
    outcome: str
    reasons: tuple[str, ...]
    champion_before: int | None = None
    who: str = "rule"
    at: str = ""


def now() -> str:
    """Returns the current time for display."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write(ledger: Ledger, model: ModelRecord, decision: DecisionRecord) -> None:
    """Adds a decision about `model` to the tag of its version, and to the table of its run.

    The table holds all decisions, the tag as many of the newest as fit. Repeating the last decision changes nothing.
    """
    assert model.version is not None, "a decision is about a version"
    known = read(ledger, model)
    if known and _same(known[-1], decision):
        return
    if model.run_id is not None:
        rows = _table(ledger, model.run_id, known)
        if not rows or _row(decision) | {"at": ""} != rows[-1] | {"at": ""}:  # else the last attempt ended after this
            ledger.write_table(model.run_id, TABLE, [*rows, _row(decision)])
    ledger.client.set_model_version_tag(model.registered_name, str(model.version), TAG, _text([*known, decision]))


def _table(ledger: Ledger, run_id: str, known: Sequence[DecisionRecord]) -> list[dict[str, Any]]:
    """Returns the rows of the table, or of the `known` decisions where there is no table (any more)."""
    try:
        return ledger.read_table(run_id, TABLE)
    except LedgerError as error:
        if error.may_pass:
            raise
        return [_row(entry) for entry in known]


def _row(decision: DecisionRecord) -> dict[str, Any]:
    return {**to_json(decision), "reasons": "\n".join(decision.reasons)}


def read(ledger: Ledger, model: ModelRecord) -> list[DecisionRecord]:
    """Returns the decisions in a version's tag, the oldest first; the tag holds as many of the newest as fit."""
    assert model.version is not None, "a decision is about a version"
    try:
        tags = ledger.client.get_model_version(model.registered_name, str(model.version)).tags
    except LedgerError as error:
        if error.code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return []
    return [from_json(DecisionRecord, entry) for entry in json.loads(tags.get(TAG, "[]"))]


def champion_before(decisions: Sequence[DecisionRecord]) -> int | None:
    """Returns the champion that a version replaced when it was last promoted, or None."""
    return next((entry.champion_before for entry in reversed(decisions) if entry.outcome == PROMOTED), None)


def _same(one: DecisionRecord, other: DecisionRecord) -> bool:
    def of(entry: DecisionRecord) -> Any:
        return entry.outcome, entry.reasons, entry.champion_before, entry.who

    return bool(of(one) == of(other))


def _text(decisions: Sequence[DecisionRecord]) -> str:
    """Returns the newest decisions that fit into a tag, as JSON; the reasons of the last one may be shortened."""
    for first in range(len(decisions)):
        if len(text := json.dumps(to_json(decisions[first:]))) <= TAG_CHARACTERS:
            return text
    last = decisions[-1]
    short = to_json(last) | {"reasons": [reason[:200] for reason in last.reasons[:10]] + ["..."]}
    return json.dumps([short])
