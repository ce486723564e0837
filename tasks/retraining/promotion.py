"""The promotion stage: reads and moves the aliases of a registered model (`records.CHAMPION` and the next two)."""

import json
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from ringmaster.codec import from_json, to_json
from ringmaster.errors import LedgerError, PromotionRefused, SignatureError
from ringmaster.model_lineage import Ledger, ModelRecord
from ringmaster.model_lineage.ledger.families import (
    CHALLENGER_OF,
    NOBODY,
    final_fault,
    of_tag,
    unless_lost,
    unless_missing,
)
from ringmaster.model_lineage.ledger.families import DECISION as TAG
from ringmaster.model_lineage.records import (
    CHALLENGER,
    CHAMPION,
    KEPT,
    PREVIOUS,
    PROMOTED,
    ROLLED_BACK,
    WAITING,
)
from ringmaster.tasks.alarms import Alarm, promotion_refused
from ringmaster.tasks.process_identity import own_row, runs_here
from ringmaster.tasks.retraining.policy import PromotionDecision
from ringmaster.tasks.storage.database import Database

TABLE = "promotion/decisions.json"
TAG_CHARACTERS = 5000  # MLflow's limit for a tag of a version
TRAINED = "retraining/trained.json"
"""The artifact of a model's MLflow run with the data that a retraining run trained it on."""


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


def current_time() -> str:
    """Returns the current time for display."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_decision(
    ledger: Ledger, model: ModelRecord, decision: DecisionRecord, *, notice: Callable[[str], None] = lambda text: None
) -> None:
    """Adds a decision about `model` to the tag of its version, and to the table of its run.

    The table holds all decisions, the tag as many of the newest as fit. Repeating the last decision changes nothing.

    notice: is called where the run was deleted and has no table any more.
    """
    known = read_decisions(ledger, model)
    if known and replace(known[-1], at=decision.at) == decision:
        return
    if model.run_id is not None:
        rows = unless_lost(ledger.read_table, model.run_id, TABLE)
        if rows is None:  # there is no table (any more)
            rows = [_row(entry) for entry in known]
        is_new = not rows or _row(decision) | {"at": ""} != rows[-1] | {
            "at": ""
        }  # else the last attempt ended after this
        if is_new and (fault := final_fault(ledger.write_table, model.run_id, TABLE, [*rows, _row(decision)])):
            notice(f"{model.uri} has the decision, but the table of its run has not: {fault}")
    ledger.client.set_model_version_tag(model.registered_name, str(version_of(model)), TAG, _text([*known, decision]))


def _row(decision: DecisionRecord) -> dict[str, Any]:
    return {**to_json(decision), "reasons": "\n".join(decision.reasons)}


def read_decisions(ledger: Ledger, model: ModelRecord) -> list[DecisionRecord]:
    """Returns the decisions in a version's tag, the oldest first; the tag holds as many of the newest as fit."""
    version = unless_missing(ledger.client.get_model_version, model.registered_name, str(version_of(model)))
    return [] if version is None else _decisions_in(version.tags)


def _decisions_in(tags: Mapping[str, str]) -> list[DecisionRecord]:
    """Returns the decisions in the tags of a version; none where somebody has damaged theirs."""
    with suppress(ValueError):
        return [from_json(DecisionRecord, entry) for entry in of_tag(tags, TAG, list)]
    return []


def champion_before(decisions: Sequence[DecisionRecord]) -> int | None:
    """Returns the champion that a version replaced when it was last promoted, or None."""
    return next((entry.champion_before for entry in reversed(decisions) if entry.outcome == PROMOTED), None)


@dataclass(frozen=True, kw_only=True)
class ServingVersion:
    """The version of a registered model that was its champion at some time, and the decision that made it so."""

    model: str
    version: int
    decision: DecisionRecord


def served_at(decisions: Mapping[str, Iterable[DecisionRecord]], at: datetime) -> list[ServingVersion]:
    """Returns who served at a time, by the decisions about the versions of each registered model."""
    result = []
    for model, entries in sorted(decisions.items()):
        serving: list[tuple[int, DecisionRecord]] = []  # the champions one after another, without those taken back
        for entry in sorted(entries, key=lambda entry: entry.at):
            if not entry.at or datetime.fromisoformat(entry.at) > at:
                continue
            if entry.outcome == PROMOTED:
                serving.append((entry.version, entry))
            elif entry.outcome == ROLLED_BACK and len(serving) > 1:
                serving.pop()
                serving[-1] = (serving[-1][0], entry)
        if serving:
            version, decision = serving[-1]
            result.append(ServingVersion(model=model, version=version, decision=decision))
    return result


def all_decisions(ledger: Ledger) -> dict[str, list[DecisionRecord]]:
    """Returns all decisions by registered model: of each version, as many of the newest as its tag holds."""
    result: dict[str, list[DecisionRecord]] = {}
    for version in ledger.model_versions():
        result.setdefault(version.name, []).extend(_decisions_in(version.tags))
    return result


def _text(decisions: Sequence[DecisionRecord]) -> str:
    """Returns the newest decisions that fit into a tag, as JSON; the reasons of the last one may be shortened."""
    for first in range(len(decisions)):
        if len(text := json.dumps(to_json(decisions[first:]))) <= TAG_CHARACTERS:
            return text
    last = decisions[-1]
    short = to_json(last) | {"reasons": [reason[:200] for reason in last.reasons[:10]] + ["..."]}
    return json.dumps([short])


METADATA = sa.MetaData()
MOVES = sa.Table(
    "alias_moves",
    METADATA,
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("token", sa.Text, nullable=False),
    sa.Column("moves", sa.JSON, nullable=False),
    sa.Column("decision", sa.JSON, nullable=False),
    sa.Column("host", sa.Text, nullable=False),
    sa.Column("pid", sa.BigInteger, nullable=False),  # 0: its process has given up
    sa.Column("born_s", sa.Float, nullable=False),
    sa.Column("since_s", sa.Float, nullable=False),
)
STRANGER_S = 600.0  # the age at which a row of another machine counts as abandoned; moves take a second


@dataclass(frozen=True, kw_only=True)
class AliasMove:
    """An alias and the version to point it to; version None deletes the alias."""

    alias: str
    version: int | None


class MoveLog:
    """The log in `database` of moves that have begun and not finished.

    notice: shows a line about a move that is set aside, or not recorded everywhere.
    """

    def __init__(self, database: Database, *, notice: Callable[[str], None] = lambda text: None) -> None:
        self._database, self._notice = database, notice
        database.write(lambda connection: METADATA.create_all(connection))

    def move(self, ledger: Ledger, model: str, moves: Sequence[AliasMove], decision: DecisionRecord) -> None:
        """Completes interrupted moves of other processes, then makes `moves` in this order and records the decision.

        Raises PromotionRefused if the model's champion is no longer the one that the decision assumes, if one of the
        versions has been deleted, or if another promotion of the model is in progress; then this call moves nothing.
        """
        self.finish_left_behind(ledger, model)
        token = self._begin(model, moves, decision)
        try:
            fault = _fault(ledger, model, moves, decision)
            if fault is not None:
                self._end(model, token)
                raise PromotionRefused(fault)
            self._move_aliases(ledger, model, moves, decision)
        except BaseException:
            self._give_up(model, token)
            raise
        self._end(model, token)

    def finish_left_behind(self, ledger: Ledger, model: str | None = None) -> list[str]:
        """Completes the moves of processes that have ended, for one model or for all. Returns the models concerned.

        Moves that cannot be completed, now or later, are set aside and reported: what is lost for one
        model must not stop the moves that come after.
        """
        finished = []
        for row in self._left_behind(model):
            token = self._adopt(row)
            if token is None:  # another process is doing so
                continue
            model = str(row["model"])
            try:
                fault = self._finish(ledger, row)
            except BaseException:
                self._give_up(model, token)
                raise
            self._end(model, token)
            if fault is None:
                finished.append(model)
            else:
                self._notice(
                    f"a move of aliases of {model} was interrupted, cannot be finished and is set aside; the aliases "
                    f"stay where they are, as `ringmaster lineage show {model}` shows. It was {row['moves']}: {fault}"
                )
        return finished

    def _finish(self, ledger: Ledger, row: Mapping[str, Any]) -> str | None:
        """Completes a move; returns why it can never be, or None. Raises LedgerError if a later attempt may succeed."""
        try:
            moves = [AliasMove(**move) for move in json.loads(row["moves"])]
            decision = from_json(DecisionRecord, json.loads(row["decision"]))
            # A promotion or deletion by a program without this log may have made the decision obsolete.
            fault = _fault(ledger, row["model"], moves, decision)
            if fault is None:
                self._move_aliases(ledger, row["model"], moves, decision)
        except LedgerError as error:
            if error.may_pass:
                raise
            fault = str(error)
        except (TypeError, ValueError) as error:  # the row is damaged
            fault = f"the record of it is damaged: {error}"
        return fault

    def _begin(self, model: str, moves: Sequence[AliasMove], decision: DecisionRecord) -> str:
        row = {
            "model": model,
            "moves": [vars(m) for m in moves],
            "decision": to_json(decision),
            **own_row(),
            "since_s": time.time(),
        }

        def act(connection: sa.Connection) -> str:
            columns = MOVES.c.token, MOVES.c.pid, MOVES.c.host
            result = connection.execute(sa.select(*columns).where(MOVES.c.model == model)).mappings().first()
            if result is not None and result["token"] != row["token"]:  # an equal token: this commit was retried
                raise PromotionRefused(
                    f"another promotion of {model} is under way, of process {result['pid']} on {result['host']}. "
                    "To fix: wait for it, and compare with its champion"
                )
            if result is None:
                connection.execute(sa.insert(MOVES).values(**row))
            return str(row["token"])

        return self._database.write(act)

    def _left_behind(self, model: str | None) -> list[dict[str, Any]]:
        # As text, which is read row by row: a damaged one must not hide the others.
        columns = [sa.cast(c, sa.Text).label(c.name) if isinstance(c.type, sa.JSON) else c for c in MOVES.c]
        requested = sa.select(*columns) if model is None else sa.select(*columns).where(MOVES.c.model == model)
        rows = self._database.read(lambda connection: connection.execute(requested).mappings().all())
        return [dict(row) for row in rows if not _lives(dict(row))]

    def _adopt(self, row: dict[str, Any]) -> str | None:
        holder = {**own_row(), "since_s": time.time()}

        def act(connection: sa.Connection) -> str | None:
            own = (MOVES.c.model == row["model"]) & (MOVES.c.token.in_([row["token"], holder["token"]]))
            changed = connection.execute(sa.update(MOVES).where(own).values(**holder))
            return str(holder["token"]) if changed.rowcount else None

        return self._database.write(act)

    def _move_aliases(self, ledger: Ledger, model: str, moves: Sequence[AliasMove], decision: DecisionRecord) -> None:
        record = ledger.resolve_model(f"models:/{model}/{decision.version}")
        for move in moves:
            if move.version is not None:
                ledger.set_alias(model, move.alias, move.version)
            elif ledger.get_alias(model, move.alias) is not None:
                ledger.client.delete_registered_model_alias(model, move.alias)
        write_decision(ledger, record, decision, notice=self._notice)
        moved = [ledger.get_version(model, move.version) for move in moves if move.version is not None]
        if fault := final_fault(ledger.redraw, record, *(other for other in moved if other is not None)):
            self._notice(f"the pictures of the lineage of {record.uri} are not drawn again: {fault}")

    def _give_up(self, model: str, token: str) -> None:
        self._database.execute(sa.update(MOVES).where(_of(model, token)).values(pid=0))

    def _end(self, model: str, token: str) -> None:
        self._database.execute(sa.delete(MOVES).where(_of(model, token)))


def _of(model: str, token: str) -> Any:
    return (MOVES.c.model == model) & (MOVES.c.token == token)


def _fault(ledger: Ledger, model: str, moves: Sequence[AliasMove], decision: DecisionRecord) -> str | None:
    """Returns why some moves cannot be made (any more), or None if they can.

    All versions must exist, as a deleted one would leave the aliases half-moved for good. The champion must be the one
    that the decision assumes, or already the one that it makes.
    """
    versions = dict.fromkeys([decision.version, *(move.version for move in moves if move.version is not None)])
    gone = [str(version) for version in versions if ledger.get_version(model, version) is None]
    if gone:
        return f"{model} has no version {' and '.join(gone)} any more. To fix: name another version"
    for move in moves:
        if move.alias == CHAMPION and move.version is not None:
            try:
                ledger.check_use(ledger.resolve_model(f"models:/{model}/{move.version}"), "promote")
            except SignatureError as error:
                return str(error)
    champion = ledger.get_alias(model, CHAMPION)
    result = None if champion is None else champion.version
    if result in [decision.champion_before, *(move.version for move in moves if move.alias == CHAMPION)]:
        return None
    return (
        f"the champion of {model} is version {result} by now, not {decision.champion_before} as it was when this was "
        "decided. To fix: compare with the new champion"
    )


def _lives(row: dict[str, Any]) -> bool:
    """Whether the process that began the moves still runs, as far as this machine can determine."""
    if row["pid"] == 0:
        return False
    if row["host"] != platform.node():
        return abs(time.time() - float(row["since_s"])) < STRANGER_S  # a clock may have been set back
    return runs_here(row["pid"], born_s=row["born_s"])


@dataclass(frozen=True, kw_only=True)
class ServingVersions:
    """The current versions of a registered model.

    challenger: except one that a sweep has created under its own name without being requested to.
    latest: the newest version that a retraining run has made, or that an alias names, whatever was decided about it.
    candidate: the same version, if it has not been compared with a champion yet.
    foreign: a newer version that anything else has made, such as a batch of the same name. It is not a candidate.
    fault: why the registry's entries of this name cannot be used; they are of other programs, or damaged.
    """

    name: str
    champion: ModelRecord | None = None
    challenger: ModelRecord | None = None
    latest: ModelRecord | None = None
    candidate: ModelRecord | None = None
    foreign: int | None = None
    fault: str = ""


def standings(ledger: Ledger, names: Iterable[str]) -> dict[str, ServingVersions]:
    """Returns the current versions of each registered model; one never trained, or deleted, has none."""
    wanted = list(names)
    versions: dict[str, set[int]] = {name: set() for name in wanted}
    for model in ledger.models():
        if model.registered_name in versions and model.version is not None:
            versions[model.registered_name].add(model.version)
    return {name: _serving_versions(ledger, name, versions[name]) for name in wanted}


def _serving_versions(ledger: Ledger, name: str, versions: Iterable[int]) -> ServingVersions:
    existing = (ledger.get_version(name, version) for version in sorted(versions, reverse=True))
    newest_first = [record for record in existing if record is not None]  # a model may outlive its version
    if not newest_first:
        return ServingVersions(name=name)
    try:
        champion, challenger = ledger.get_alias(name, CHAMPION), ledger.get_alias(name, CHALLENGER)
        if challenger is not None and _is_of_nobody(ledger, challenger):
            challenger = None
        named = [record.version for record in (champion, challenger) if record is not None]
        own = (each for each in newest_first if each.version in named or _is_of_retraining(ledger, each))
        latest = next(own, None)
        candidate = None if latest is None or _was_compared(ledger, latest, champion, challenger) else latest
    except LedgerError as error:
        return ServingVersions(name=name, fault=lasting(error))
    return ServingVersions(
        name=name,
        champion=champion,
        challenger=challenger,
        latest=latest,
        candidate=candidate,
        foreign=None if latest == newest_first[0] else newest_first[0].version,
    )


def _is_of_nobody(ledger: Ledger, challenger: ModelRecord) -> bool:
    """Whether a challenger is the best trial of a sweep of the same name, which nobody has made a challenger of it."""
    version = ledger.client.get_model_version(challenger.registered_name, str(version_of(challenger)))
    return bool(version.tags.get(CHALLENGER_OF) == NOBODY)


def _is_of_retraining(ledger: Ledger, model: ModelRecord) -> bool:
    """Whether a retraining run has made the model. Those of earlier releases have only the artifact of its data."""
    if model.origin.retraining is not None:
        return True
    return model.run_id is not None and unless_lost(ledger.read_text, model.run_id, TRAINED) is not None


def lasting(error: ValueError | OSError) -> str:
    """Returns the text of an error that is the fault of one model; the others of its retraining run continue.

    Raises the error again if the same call may succeed later: the run resumes when it is called again.
    """
    if isinstance(error, LedgerError) and error.may_pass:
        raise error
    return str(error)


def _was_compared(
    ledger: Ledger, latest: ModelRecord, champion: ModelRecord | None, challenger: ModelRecord | None
) -> bool:
    """Whether the newest version is no newer than the champion, or than a challenger that was compared with one."""
    version = version_of(latest)
    if champion is not None and version <= version_of(champion):
        return True
    compared = latest if challenger is None or version > version_of(challenger) else challenger
    made = read_decisions(ledger, compared)  # it may wait for approval, or be just a sweep's proposal
    return bool(made) and made[-1].outcome != WAITING


def apply(
    ledger: Ledger,
    candidate: ModelRecord,
    decision: PromotionDecision,
    *,
    log: MoveLog,
    champion: int | None,
    who: str = "rule",
    emit_alarm: Callable[[Alarm], None] = lambda alarm: None,
) -> None:
    """Moves the aliases of the candidate's name by `decision`, and records it. A repeated call changes nothing.

    The order of the moves guarantees that a crash between any two steps leaves a champion, and that a repetition ends
    in the same aliases. The decision is recorded last, because it marks the comparison as done.

    champion: the version that the candidate was compared with.
    who: the decider.
    emit_alarm: raises an alarm, here for a candidate that does not become champion.

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
        emit_alarm(promotion_refused(name, version=version, why=str(error)))
        raise
    if not decision.promote:
        emit_alarm(promotion_refused(name, version=version, why=decision.why, who=who))


def roll_back(ledger: Ledger, name: str, *, log: MoveLog, who: str, why: str = "") -> tuple[int, int]:
    """Makes the previous champion of `name` serve again; returns (its version, the version that served until now).

    `previous` then points to the champion before that one, if known, so that a further rollback is possible. The
    version taken back counts as compared: only a new comparison promotes it again. Raises PromotionRefused if there is
    no champion to return to.
    """
    log.finish_left_behind(ledger, name)
    champion, previous = ledger.get_alias(name, CHAMPION), ledger.get_alias(name, PREVIOUS)
    if champion is None or previous is None or champion.version == previous.version:
        text = "no champion" if champion is None else "no previous champion"
        raise PromotionRefused(f"{name} has {text} to go back to. To fix: name a model that was promoted twice")
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
    """Records that a candidate waits for approval. No alias moves: the next retraining run asks for approval again."""
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


def version_of(model: ModelRecord | None) -> int:
    """Returns the version number of a registered model."""
    assert model is not None and model.version is not None, f"{model} is not a version of a registered model"
    return model.version
