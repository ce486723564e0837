"""What was decided of a model's versions, kept with them: a tag on each version, a table on the run that made it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ringmaster.model_lineage import Ledger, LedgerError, ModelRecord
from ringmaster.techniques.values import from_json, to_json

TAG = "ringmaster.decision"
TABLE = "promotion/decisions.json"
PROMOTED, KEPT, ROLLED_BACK, WAITING = "promoted", "kept", "rolled back", "waiting"
TAG_CHARACTERS = 5000  # that MLflow lets a tag of a version have


@dataclass(frozen=True, kw_only=True)
class DecisionRecord:
    """A decision about one version. outcome: "promoted", "kept", "rolled back" or "waiting" (for a person).

    champion_before: the version that served until then. who: that decided, a policy's name or a person.
    """

    version: int
    outcome: str
    reasons: tuple[str, ...]
    champion_before: int | None = None
    who: str = "rule"
    at: str = ""


def now() -> str:
    """The moment, for people."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write(ledger: Ledger, model: ModelRecord, decision: DecisionRecord) -> None:
    """Keeps a decision about `model`: the last one as its version's tag, all of them in its run's table.

    The same decision again changes nothing.
    """
    assert model.version is not None, "a decision is about a version"
    known = read(ledger, model)
    if known and _same(known[-1], decision):
        return
    every = [*known, decision]
    if model.run_id is not None:
        rows = [{**to_json(entry), "reasons": "\n".join(entry.reasons)} for entry in every]
        ledger.write_table(model.run_id, TABLE, rows)
    ledger.client.set_model_version_tag(model.registered_name, str(model.version), TAG, _text(every))


def read(ledger: Ledger, model: ModelRecord) -> list[DecisionRecord]:
    """The decisions about a version, the oldest first; as many as its tag has room for."""
    assert model.version is not None, "a decision is about a version"
    try:
        tags = ledger.client.get_model_version(model.registered_name, str(model.version)).tags
    except LedgerError as error:
        if error.code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return []
    return [from_json(DecisionRecord, entry) for entry in json.loads(tags.get(TAG, "[]"))]


def champion_before(decisions: Sequence[DecisionRecord]) -> int | None:
    """The champion that a version took the place of when it was promoted last."""
    return next((entry.champion_before for entry in reversed(decisions) if entry.outcome == PROMOTED), None)


def _same(one: DecisionRecord, other: DecisionRecord) -> bool:
    def of(entry: DecisionRecord) -> Any:
        return entry.outcome, entry.reasons, entry.champion_before, entry.who

    return bool(of(one) == of(other))


def _text(decisions: Sequence[DecisionRecord]) -> str:
    """The newest ones that a tag has room for; of the last one, if need be, only the first reasons."""
    for first in range(len(decisions)):
        if len(text := json.dumps(to_json(decisions[first:]))) <= TAG_CHARACTERS:
            return text
    last = decisions[-1]
    short = to_json(last) | {"reasons": [reason[:200] for reason in last.reasons[:10]] + ["..."]}
    return json.dumps([short])
