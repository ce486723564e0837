"""The promotion stage: reads and moves the aliases of a registered model (see `names` for their meaning)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ringmaster.errors import PromotionRefused
from ringmaster.model_lineage import Ledger, ModelRecord
from ringmaster.model_lineage.records import CHALLENGER, CHAMPION, PREVIOUS
from ringmaster.tasks.alarms import Alarm, promotion_refused
from ringmaster.tasks.retraining.alias_moves import (
    KEPT,
    PROMOTED,
    ROLLED_BACK,
    WAITING,
    AliasMove,
    DecisionRecord,
    MoveLog,
    champion_before,
    current_time,
    read_decisions,
    write_decision,
)
from ringmaster.tasks.retraining.policy import PromotionDecision


@dataclass(frozen=True, kw_only=True)
class ServingVersions:
    """The current versions of a registered model.

    latest: the newest version, whatever was decided about it.
    candidate: the same version, if it has not been compared with a champion yet.
    """

    name: str
    champion: ModelRecord | None = None
    challenger: ModelRecord | None = None
    latest: ModelRecord | None = None
    candidate: ModelRecord | None = None


def standings(ledger: Ledger, names: Iterable[str]) -> dict[str, ServingVersions]:
    """Returns the current versions of each registered model; one never trained, or deleted, has none."""
    wanted = list(names)
    versions: dict[str, set[int]] = {name: set() for name in wanted}
    for model in ledger.models():
        if model.registered_name in versions and model.version is not None:
            versions[model.registered_name].add(model.version)
    return {name: _standing(ledger, name, _newest(ledger, name, versions[name])) for name in wanted}


def _standing(ledger: Ledger, name: str, latest: ModelRecord | None) -> ServingVersions:
    if latest is None:
        return ServingVersions(name=name)
    champion, challenger = ledger.get_alias(name, CHAMPION), ledger.get_alias(name, CHALLENGER)
    candidate = None if _was_compared(ledger, latest, champion, challenger) else latest
    return ServingVersions(name=name, champion=champion, challenger=challenger, latest=latest, candidate=candidate)


def _was_compared(
    ledger: Ledger, latest: ModelRecord, champion: ModelRecord | None, challenger: ModelRecord | None
) -> bool:
    """Whether the newest version is no newer than the champion, or than a challenger that was compared with one."""
    version = version_of(latest)
    if champion is not None and version <= version_of(champion):
        return True
    return challenger is not None and version <= version_of(challenger) and _has_decision(ledger, challenger)


def _has_decision(ledger: Ledger, model: ModelRecord) -> bool:
    """Whether a version's comparison has ended: it neither waits for approval nor is just a sweep's proposal."""
    made = read_decisions(ledger, model)
    return bool(made) and made[-1].outcome != WAITING


def _newest(ledger: Ledger, name: str, versions: Iterable[int]) -> ModelRecord | None:
    """Returns the newest of these versions that the registry still has; a model may outlive its version."""
    found = (ledger.get_version(name, version) for version in sorted(versions, reverse=True))
    return next((record for record in found if record is not None), None)


def apply(
    ledger: Ledger,
    candidate: ModelRecord,
    decision: PromotionDecision,
    *,
    log: MoveLog,
    champion: int | None,
    who: str = "rule",
    sound: Callable[[Alarm], None] = lambda alarm: None,
) -> None:
    """Moves the aliases of the candidate's name by `decision`, and records it. A repeated call changes nothing.

    The order of the moves guarantees that a crash between any two steps leaves a champion, and that a repetition ends
    in the same aliases. The decision is recorded last, because it marks the comparison as done.

    champion: the version that the candidate was compared with.
    who: the decider.
    sound: raises an alarm, here for a candidate that does not become champion.

    Raises PromotionRefused if another promotion was faster.
    """
    name, version = candidate.registered_name, version_of(candidate)
    moves = [AliasMove(alias=CHALLENGER, version=version)]
    if decision.promote and champion != version:
        moves.insert(0, AliasMove(alias=CHAMPION, version=version))
        if champion is not None:
            moves.insert(0, AliasMove(alias=PREVIOUS, version=champion))
    entry = DecisionRecord(
        version=version,
        outcome=PROMOTED if decision.promote else KEPT,
        reasons=decision.reasons or (decision.why,),
        champion_before=champion,
        who=who,
        at=current_time(),
    )
    try:
        log.move(ledger, name, moves, entry)
    except PromotionRefused as error:
        sound(promotion_refused(name, version=version, why=str(error)))
        raise
    if not decision.promote:
        sound(promotion_refused(name, version=version, why=decision.why, who=who))


def roll_back(ledger: Ledger, name: str, *, log: MoveLog, who: str, why: str = "") -> tuple[int, int]:
    """Makes the previous champion of `name` serve again; returns (its version, the version that served until now).

    `previous` then points to the champion before that one, if known, so that a further rollback is possible. The
    version taken back counts as compared: only a new comparison promotes it again. Raises PromotionRefused if there is
    no champion to return to.
    """
    log.finish_left_behind(ledger, name)
    champion, previous = ledger.get_alias(name, CHAMPION), ledger.get_alias(name, PREVIOUS)
    if champion is None or previous is None or champion.version == previous.version:
        said = "no champion" if champion is None else "no previous champion"
        raise PromotionRefused(f"{name} has {said} to go back to. To fix: name a model that was promoted twice")
    restored, taken_back = version_of(previous), version_of(champion)
    before = champion_before(read_decisions(ledger, previous))
    if before is not None and ledger.get_version(name, before) is None:
        before = None  # deleted in the meantime
    moves = [AliasMove(alias=CHAMPION, version=restored), AliasMove(alias=PREVIOUS, version=before)]
    entry = DecisionRecord(
        version=taken_back,
        outcome=ROLLED_BACK,
        reasons=(why or f"rolled back to version {restored}",),
        champion_before=taken_back,
        who=who,
        at=current_time(),
    )
    log.move(ledger, name, moves, entry)
    return restored, taken_back


def leave_waiting(ledger: Ledger, candidate: ModelRecord, why: str, *, who: str) -> None:
    """Records that a candidate waits for approval. No alias moves: the next retraining run asks again."""
    champion = ledger.get_alias(candidate.registered_name, CHAMPION)
    entry = DecisionRecord(
        version=version_of(candidate),
        outcome=WAITING,
        reasons=(why,),
        champion_before=None if champion is None else champion.version,
        who=who,
        at=current_time(),
    )
    write_decision(ledger, candidate, entry)


def training_digest(model: ModelRecord | None) -> str | None:
    """Returns the digest of the data that the model was trained on, or None if it is unknown."""
    if model is None:
        return None
    return next((dataset.digest for dataset in model.datasets if dataset.context == "training"), None)


def version_of(model: ModelRecord) -> int:
    """Returns the version number of a registered model."""
    assert model.version is not None, f"{model.model_id} has no version"
    return model.version
