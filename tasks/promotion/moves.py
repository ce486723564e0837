"""Alias moves with a write-ahead log, so that an interrupted promotion is completed at the next start.

The registry moves one alias at a time. All moves of a promotion are therefore first written to a database, one row per
model: the database of this home, or of the pool, where all machines see it. A row is also the lock: of two concurrent
promotions of one model, one writes the row and the other is refused. The moves name versions, so that repeating them
changes nothing.
"""

from __future__ import annotations

import os
import platform
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Connection,
    Float,
    MetaData,
    Table,
    Text,
    delete,
    insert,
    select,
    update,
)

from ringmaster.codec import from_json, to_json
from ringmaster.errors import PromotionRefused
from ringmaster.model_lineage import Ledger
from ringmaster.tasks.promotion import decisions
from ringmaster.tasks.promotion.decisions import DecisionRecord
from ringmaster.tasks.promotion.names import CHAMPION
from ringmaster.tasks.storage.database import Database

METADATA = MetaData()
MOVES = Table(
    "alias_moves",
    METADATA,
    Column("model", Text, primary_key=True),
    Column("token", Text, nullable=False),
    Column("moves", JSON, nullable=False),
    Column("decision", JSON, nullable=False),
    Column("host", Text, nullable=False),
    Column("pid", BigInteger, nullable=False),  # 0: its process has given up
    Column("born_s", Float, nullable=False),
    Column("since_s", Float, nullable=False),
)
STRANGER_S = 600.0  # the age at which a row of another machine counts as abandoned; moves take a second


@dataclass(frozen=True, kw_only=True)
class Move:
    """An alias and the version to point it to; version None deletes the alias."""

    alias: str
    version: int | None


class MoveLog:
    """The log in `database` of moves that have begun and not finished."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.write(lambda connection: METADATA.create_all(connection))

    def move(self, ledger: Ledger, model: str, moves: Sequence[Move], decision: DecisionRecord) -> None:
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
            _carry_out(ledger, model, moves, decision)
        except BaseException:
            self._give_up(model, token)
            raise
        self._end(model, token)

    def finish_left_behind(self, ledger: Ledger, model: str | None = None) -> list[str]:
        """Completes the moves of processes that have ended, for one model or for all. Returns the models concerned."""
        finished = []
        for row in self._left_behind(model):
            token = self._adopt(row)
            if token is None:  # another process is doing so
                continue
            try:
                moves = [Move(**move) for move in row["moves"]]
                decision = from_json(DecisionRecord, row["decision"])
                # A promotion or deletion by a program without this log may have made the decision obsolete.
                applies = _fault(ledger, row["model"], moves, decision) is None
                if applies:
                    _carry_out(ledger, row["model"], moves, decision)
            except BaseException:
                self._give_up(row["model"], token)
                raise
            self._end(row["model"], token)
            if applies:
                finished.append(str(row["model"]))
        return finished

    def _begin(self, model: str, moves: Sequence[Move], decision: DecisionRecord) -> str:
        row = {"model": model, "moves": [vars(m) for m in moves], "decision": to_json(decision), **_holder()}

        def act(connection: Connection) -> str:
            found = connection.execute(select(MOVES).where(MOVES.c.model == model)).mappings().first()
            if found is not None and found["token"] != row["token"]:  # an equal token: this commit was retried
                raise PromotionRefused(
                    f"another promotion of {model} is under way, of process {found['pid']} on {found['host']}. "
                    "To fix: wait for it, and compare with its champion"
                )
            if found is None:
                connection.execute(insert(MOVES).values(**row))
            return str(row["token"])

        return self._database.write(act)

    def _left_behind(self, model: str | None) -> list[dict[str, Any]]:
        asked = select(MOVES) if model is None else select(MOVES).where(MOVES.c.model == model)
        rows = self._database.read(lambda connection: connection.execute(asked).mappings().all())
        return [dict(row) for row in rows if not _lives(dict(row))]

    def _adopt(self, row: dict[str, Any]) -> str | None:
        holder = _holder()

        def act(connection: Connection) -> str | None:
            mine = (MOVES.c.model == row["model"]) & (MOVES.c.token.in_([row["token"], holder["token"]]))
            changed = connection.execute(update(MOVES).where(mine).values(**holder))
            return str(holder["token"]) if changed.rowcount else None

        return self._database.write(act)

    def _give_up(self, model: str, token: str) -> None:
        self._database.write(
            lambda connection: connection.execute(update(MOVES).where(_of(model, token)).values(pid=0))
        )

    def _end(self, model: str, token: str) -> None:
        self._database.write(lambda connection: connection.execute(delete(MOVES).where(_of(model, token))))


def _of(model: str, token: str) -> Any:
    return (MOVES.c.model == model) & (MOVES.c.token == token)


def _fault(ledger: Ledger, model: str, moves: Sequence[Move], decision: DecisionRecord) -> str | None:
    """Returns why some moves cannot be made (any more), or None if they can.

    All versions must exist, as a deleted one would leave the aliases half-moved for good. The champion must be the one
    that the decision assumes, or already the one that it makes.
    """
    versions = dict.fromkeys([decision.version, *(move.version for move in moves if move.version is not None)])
    gone = [str(version) for version in versions if ledger.get_version(model, version) is None]
    if gone:
        return f"{model} has no version {' and '.join(gone)} any more. To fix: name another version"
    champion = ledger.get_alias(model, CHAMPION)
    found = None if champion is None else champion.version
    if found in [decision.champion_before, *(move.version for move in moves if move.alias == CHAMPION)]:
        return None
    return (
        f"the champion of {model} is version {found} by now, not {decision.champion_before} as it was when this was "
        "decided. To fix: compare with the new champion"
    )


def _carry_out(ledger: Ledger, model: str, moves: Sequence[Move], decision: DecisionRecord) -> None:
    for move in moves:
        if move.version is not None:
            ledger.set_alias(model, move.alias, move.version)
        elif ledger.get_alias(model, move.alias) is not None:
            ledger.client.delete_registered_model_alias(model, move.alias)
    record = ledger.resolve_model(f"models:/{model}/{decision.version}")
    decisions.write(ledger, record, decision)
    moved = [ledger.get_version(model, move.version) for move in moves if move.version is not None]
    ledger.redraw(record, *(other for other in moved if other is not None))


def _holder() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "token": uuid.uuid4().hex,
        "host": platform.node(),
        "pid": pid,
        "born_s": psutil.Process(pid).create_time(),
        "since_s": time.time(),
    }


def _lives(row: dict[str, Any]) -> bool:
    """Whether the process that began the moves still runs, as far as this machine can determine."""
    if row["pid"] == 0:
        return False
    if row["host"] != platform.node():
        return time.time() - float(row["since_s"]) < STRANGER_S
    try:
        process = psutil.Process(row["pid"])
        is_the_same = abs(float(process.create_time()) - float(row["born_s"])) < 1.0
        return is_the_same and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
