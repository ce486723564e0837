"""The promotion stage: reads and moves the aliases of a registered model (`names` says what they mean)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ringmaster.model_lineage import Ledger, ModelRecord
from ringmaster.tasks.alarms import Alarm, promotion_refused
from ringmaster.tasks.promotion import decisions
from ringmaster.tasks.promotion.decisions import KEPT, PROMOTED, ROLLED_BACK, WAITING, DecisionRecord
from ringmaster.tasks.promotion.moves import Move, MoveLog, PromotionRefused
from ringmaster.tasks.promotion.names import CHALLENGER, CHAMPION, PREVIOUS
from ringmaster.tasks.promotion.policy import Decision


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a registered model stands. latest: its newest version, whatever became of that; candidate: the same, where
    it was not compared with a champion yet."""

    name: str
    champion: ModelRecord | None = None
    challenger: ModelRecord | None = None
    latest: ModelRecord | None = None
    candidate: ModelRecord | None = None


def standings(ledger: Ledger, names: Iterable[str]) -> dict[str, Standing]:
    """The standing of each registered model; one that was never trained, or was deleted, stands nowhere."""
    wanted = list(names)
    versions: dict[str, set[int]] = {name: set() for name in wanted}
    for model in ledger.models():
        if model.registered_name in versions and model.version is not None:
            versions[model.registered_name].add(model.version)
    return {name: _standing(ledger, name, _newest(ledger, name, versions[name])) for name in wanted}


def _standing(ledger: Ledger, name: str, latest: ModelRecord | None) -> Standing:
    if latest is None:
        return Standing(name=name)
    champion, challenger = ledger.get_alias(name, CHAMPION), ledger.get_alias(name, CHALLENGER)
    candidate = None if _was_compared(ledger, latest, champion, challenger) else latest
    return Standing(name=name, champion=champion, challenger=challenger, latest=latest, candidate=candidate)


def _was_compared(
    ledger: Ledger, latest: ModelRecord, champion: ModelRecord | None, challenger: ModelRecord | None
) -> bool:
    """Whether the newest version is no newer than the champion, or than a challenger that was compared with one."""
    version = version_of(latest)
    if champion is not None and version <= version_of(champion):
        return True
    return challenger is not None and version <= version_of(challenger) and _has_decision(ledger, challenger)


def _has_decision(ledger: Ledger, model: ModelRecord) -> bool:
    """Whether a version's comparison has ended: one that waits for a person, or that a sweep proposes, has none yet."""
    made = decisions.read(ledger, model)
    return bool(made) and made[-1].outcome != WAITING


def _newest(ledger: Ledger, name: str, versions: Iterable[int]) -> ModelRecord | None:
    """The newest of these versions that the registry still has: a model outlives the version that it was."""
    found = (ledger.get_version(name, version) for version in sorted(versions, reverse=True))
    return next((record for record in found if record is not None), None)


def apply(
    ledger: Ledger,
    candidate: ModelRecord,
    decision: Decision,
    *,
    log: MoveLog,
    champion: int | None,
    who: str = "rule",
    sound: Callable[[Alarm], None] = lambda alarm: None,
) -> None:
    """Moves the aliases of the candidate's name by `decision`, and keeps the decision; again, it changes nothing.

    In this order a crash between any two steps leaves a champion, and a repetition ends in the same aliases; the
    decision comes last, because it says that the comparison is done. champion: the version that it was compared
    with. who: that decided. sound: tells people of an alarm, which a candidate is that does not become champion. Raises
    PromotionRefused where another promotion was quicker.
    """
    name, version = candidate.registered_name, version_of(candidate)
    moves = [Move(alias=CHALLENGER, version=version)]
    if decision.promote and champion != version:
        moves.insert(0, Move(alias=CHAMPION, version=version))
        if champion is not None:
            moves.insert(0, Move(alias=PREVIOUS, version=champion))
    entry = DecisionRecord(
        version=version,
        outcome=PROMOTED if decision.promote else KEPT,
        reasons=decision.reasons or (decision.why,),
        champion_before=champion,
        who=who,
        at=decisions.now(),
    )
    try:
        log.move(ledger, name, moves, entry)
    except PromotionRefused as error:
        sound(promotion_refused(name, version=version, why=str(error)))
        raise
    if not decision.promote:
        sound(promotion_refused(name, version=version, why=decision.why, who=who))


def roll_back(ledger: Ledger, name: str, *, log: MoveLog, who: str, why: str = "") -> tuple[int, int]:
    """Lets the previous champion of `name` serve again; returns that version and the one that served until now.

    `previous` then names the champion before that one, where it is known, so that one can go back further. The one
    that is taken back stays compared: it is promoted again only by a new comparison. Raises PromotionRefused where
    there is no champion to go back to.
    """
    log.finish_left_behind(ledger, name)
    champion, previous = ledger.get_alias(name, CHAMPION), ledger.get_alias(name, PREVIOUS)
    if champion is None or previous is None or champion.version == previous.version:
        said = "no champion" if champion is None else "no previous champion"
        raise PromotionRefused(f"{name} has {said} to go back to. To fix: name a model that was promoted twice")
    restored, taken_back = version_of(previous), version_of(champion)
    before = decisions.champion_before(decisions.read(ledger, previous))
    if before is not None and ledger.get_version(name, before) is None:
        before = None  # deleted since
    moves = [Move(alias=CHAMPION, version=restored), Move(alias=PREVIOUS, version=before)]
    entry = DecisionRecord(
        version=taken_back,
        outcome=ROLLED_BACK,
        reasons=(why or f"rolled back to version {restored}",),
        champion_before=taken_back,
        who=who,
        at=decisions.now(),
    )
    log.move(ledger, name, moves, entry)
    return restored, taken_back


def leave_waiting(ledger: Ledger, candidate: ModelRecord, why: str, *, who: str) -> None:
    """Keeps that a candidate waits for a person's word. No alias moves: the next night asks again."""
    champion = ledger.get_alias(candidate.registered_name, CHAMPION)
    entry = DecisionRecord(
        version=version_of(candidate),
        outcome=WAITING,
        reasons=(why,),
        champion_before=None if champion is None else champion.version,
        who=who,
        at=decisions.now(),
    )
    decisions.write(ledger, candidate, entry)


def training_digest(model: ModelRecord | None) -> str | None:
    """The digest of the data that the model was trained on; None where it is not known."""
    if model is None:
        return None
    return next((dataset.digest for dataset in model.datasets if dataset.context == "training"), None)


def version_of(model: ModelRecord) -> int:
    """The version number of a model that was registered."""
    assert model.version is not None, f"{model.model_id} has no version"
    return model.version
