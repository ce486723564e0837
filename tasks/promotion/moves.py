"""Moves of aliases, written down before they are made, so that a half-done promotion is finished at the next start.

The registry moves one alias at a time. What is to be moved stands in a database first, one row for a model: of this
home, or of the pool, where all its machines see it. A row is also the lock: of two promotions of one model at once, one
writes it, and the other is told. The moves name versions, so that making them again changes nothing.
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

from ringmaster.model_lineage import Ledger
from ringmaster.model_lineage.faults import RingmasterError
from ringmaster.tasks.pool.database import Database
from ringmaster.tasks.promotion import decisions
from ringmaster.tasks.promotion.decisions import DecisionRecord
from ringmaster.tasks.promotion.names import CHAMPION
from ringmaster.techniques.values import from_json, to_json

METADATA = MetaData()
MOVES = Table(
    "alias_moves",
    METADATA,
    Column("model", Text, primary_key=True),
    Column("token", Text, nullable=False),
    Column("moves", JSON, nullable=False),
    Column("decision", JSON, nullable=False),
    Column("host", Text, nullable=False),
    Column("pid", BigInteger, nullable=False),  # 0: whoever began it has given up
    Column("born_s", Float, nullable=False),
    Column("since_s", Float, nullable=False),
)
STRANGER_S = 600.0  # after which a row of another machine is taken for left behind; moves take a second


class PromotionRefused(RingmasterError, ValueError):
    """Another promotion of the same model is under way, or was quicker."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """An alias and the version that it is to name; None takes the alias away."""

    alias: str
    version: int | None


class MoveLog:
    """The moves that were begun and not finished, in `database`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.write(lambda connection: METADATA.create_all(connection))

    def move(self, ledger: Ledger, model: str, moves: Sequence[Move], decision: DecisionRecord) -> None:
        """Makes `moves`, in this order, and keeps the decision; first comes what another process left half-done.

        Raises PromotionRefused where the model has another champion by now than the decision took for it, a version of
        it was deleted since, or another promotion of it is under way; then nothing was moved by this one.
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
        """Finishes what was begun by processes that ended since; of one model, or of all. Returns whose it was."""
        finished = []
        for row in self._left_behind(model):
            token = self._adopt(row)
            if token is None:  # another process is at it
                continue
            try:
                moves = [Move(**move) for move in row["moves"]]
                decision = from_json(DecisionRecord, row["decision"])
                # Where somebody else, who does not see this, has promoted or deleted since, it is no longer true.
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
            if found is not None and found["token"] != row["token"]:  # the same: a commit that was tried again
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
    """Why some moves cannot be made (any more); None where they can.

    All versions have to be there, or a deleted one would leave the aliases half-moved for good; and the champion has to
    be the one that the decision is about, or already the one that it makes.
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
    decisions.write(ledger, ledger.resolve_model(f"models:/{model}/{decision.version}"), decision)


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
    """Whether the process that began still runs, as far as can be known from here."""
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
