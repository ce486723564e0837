"""What the executor and the nodes tell each other: orders and commands one way, what gangs say the other.

It lies in the pool's database, so it outlives both sides: an executor that comes back reads on where it was, and a node
that was cut off finds what it missed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from ringmaster.tasks.pool.database import Database
from ringmaster.tasks.pool.portions import drop_in_portions
from ringmaster.tasks.pool.schema import COMMANDS, ORDERS, SAID
from ringmaster.techniques.engine.order import GangOrder
from ringmaster.techniques.values import from_json, to_json

GIVEN, TAKEN, ENDED = "given", "taken", "ended"
WITHDRAWN = "withdrawn"  # before it was taken
KILL = "kill"  # a command: end the gang at once
WORDS_A_PAGE = 2000  # read by one transaction, which a server ends where we take long over what it has read
OUTCOME = "outcome"  # the last event of a share: {"event": "outcome", "status", "message", "result"}


@dataclass(frozen=True, kw_only=True)
class Share:
    """A node's part of a gang: ranks `first_rank` to `first_rank + num_ranks - 1` of the order's `num_ranks_in_all`.

    order: of the whole gang; its slots are those of this node alone.
    meeting: "host:port" where the ranks of several nodes find each other; empty where one node has them all.
    """

    order: GangOrder
    num_ranks: int
    first_rank: int = 0
    num_ranks_in_all: int = 0
    meeting: str = ""


@dataclass(frozen=True, kw_only=True)
class OrderRecord:
    """An order as it lies in the database.

    status: "given", "taken" (by the worker), "ended" (its outcome is said, or its node is lost), "withdrawn".
    """

    segment: int
    node: str
    batch: str
    share: Share
    incarnation: str
    status: str
    flow_run: str | None


@dataclass(frozen=True, kw_only=True)
class Word:
    """What a gang said: `id` grows over all of them, `number` counts those of one share from 0."""

    id: int
    segment: int
    node: str
    number: int
    content: Mapping[str, Any]


class Mail:
    """Both ways. Numbers of segments are those of the journal; all may be called from any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # -- the executor's side -----------------------------------------------------------------------------------------

    def give(self, segment: int, *, batch: str, shares: Mapping[str, tuple[str, Share]]) -> None:
        """Orders a segment. shares: by node, the incarnation that is to take it and what it is to do."""

        def act(connection: Connection) -> None:
            known = connection.execute(select(ORDERS.c.node).where(ORDERS.c.segment == segment)).scalars().all()
            for node, (incarnation, share) in shares.items():
                if node not in known:
                    row = {"segment": segment, "node": node, "batch": batch, "content": to_json(share)}
                    connection.execute(insert(ORDERS).values(**row, incarnation=incarnation, status=GIVEN))

        self._database.write(act)

    def command(self, segment: int, command: str) -> None:
        """Tells a segment's gang something, on all its nodes."""
        self._database.write(
            lambda connection: connection.execute(insert(COMMANDS).values(segment=segment, command=command))
        )

    def note_flow_run(self, segment: int, node: str, flow_run: str) -> None:
        """Remembers the child run in which a node runs its share."""
        self._database.write(
            lambda connection: connection.execute(
                update(ORDERS).where(ORDERS.c.segment == segment, ORDERS.c.node == node).values(flow_run=flow_run)
            )
        )

    def words(self, *, after: int, segments: Collection[int] | None = None) -> Sequence[Word]:
        """What gangs have said after the word with that id, in order: all of them, or those of some segments."""
        words: list[Word] = []
        while True:
            page = self._page(after=words[-1].id if words else after, segments=segments)
            words += page
            if len(page) < WORDS_A_PAGE:
                return words

    def _page(self, *, after: int, segments: Collection[int] | None) -> list[Word]:
        query = select(SAID).where(SAID.c.id > after).order_by(SAID.c.id).limit(WORDS_A_PAGE)
        if segments is not None:
            query = query.where(SAID.c.segment.in_(segments))
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return [Word(**row._mapping) for row in rows]

    def newest_word(self) -> int:
        """The id of what was said last, 0 where nothing was."""
        newest = self._database.read(lambda connection: connection.execute(select(func.max(SAID.c.id))).scalar())
        return newest or 0

    def shares(self, segment: int) -> Sequence[OrderRecord]:
        """The orders of a segment, those that have ended too, by their first rank."""
        query = select(ORDERS).where(ORDERS.c.segment == segment)
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return sorted((_order(row._mapping) for row in rows), key=lambda order: order.share.first_rank)

    def withdraw(self, segment: int, node: str) -> bool:
        """Takes an order back; False where it was taken (or ended) before."""
        mine = (ORDERS.c.segment == segment) & (ORDERS.c.node == node)

        def act(connection: Connection) -> bool:
            connection.execute(update(ORDERS).where(mine, ORDERS.c.status == GIVEN).values(status=WITHDRAWN))
            return connection.execute(select(ORDERS.c.status).where(mine)).scalar() == WITHDRAWN

        return self._database.write(act)

    def batches(self) -> set[str]:
        """The batches of which there are orders, also such as have ended."""
        query = select(ORDERS.c.batch).distinct()
        return set(self._database.read(lambda connection: connection.execute(query).scalars().all()))

    def clear(self, batch: str) -> None:
        """Drops what was said, told and ordered for the segments of a batch; all of them have ended.

        The newest word and command stay: SQLite would give their numbers away again, and whoever has read up to them
        would miss what comes next.
        """

        segments = select(ORDERS.c.segment).where(ORDERS.c.batch == batch)
        for table in (SAID, COMMANDS):
            newest = select(func.max(table.c.id)).scalar_subquery()
            drop_in_portions(self._database, table, table.c.segment.in_(segments) & (table.c.id < newest))
        self._database.write(lambda connection: connection.execute(delete(ORDERS).where(ORDERS.c.batch == batch)))

    # -- a node's side -----------------------------------------------------------------------------------------------

    def take(self, segment: int, node: str, *, incarnation: str) -> Share | None:
        """Takes an order; None where it is not for this incarnation, or was taken or withdrawn already."""

        def act(connection: Connection) -> Any:
            mine = (ORDERS.c.segment == segment) & (ORDERS.c.node == node) & (ORDERS.c.incarnation == incarnation)
            done = connection.execute(update(ORDERS).where(mine, ORDERS.c.status == GIVEN).values(status=TAKEN))
            if not done.rowcount:
                return None
            return connection.execute(select(ORDERS.c.content).where(mine)).scalar_one()

        content = self._database.write(act)
        return None if content is None else from_json(Share, content)

    def say(self, segment: int, node: str, *, words: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Passes on what a share's gang said, each word with its number; words that are known already are left out.

        An `OUTCOME` ends the order.
        """

        def act(connection: Connection) -> None:
            here = (SAID.c.segment == segment) & (SAID.c.node == node)
            known = connection.execute(select(func.max(SAID.c.number)).where(here)).scalar()
            for number, content in words:
                if known is None or number > known:
                    row = {"segment": segment, "node": node, "number": number, "content": dict(content)}
                    connection.execute(insert(SAID).values(**row))
            if any(content["event"] == OUTCOME for _, content in words):
                share = (ORDERS.c.segment == segment) & (ORDERS.c.node == node)
                connection.execute(update(ORDERS).where(share).values(status=ENDED))

        self._database.write(act)

    def commands(self, *, after: int) -> Sequence[tuple[int, int, str]]:
        """(id, segment, command) of all commands after that id, in order."""
        rows = self._database.read(
            lambda connection: connection.execute(
                select(COMMANDS.c.id, COMMANDS.c.segment, COMMANDS.c.command)
                .where(COMMANDS.c.id > after)
                .order_by(COMMANDS.c.id)
            ).all()
        )
        return [(row.id, row.segment, row.command) for row in rows]

    # -- both --------------------------------------------------------------------------------------------------------

    def orders(self, *, node: str | None = None, incarnation: str | None = None) -> Sequence[OrderRecord]:
        """The orders that have not ended, of one node or incarnation or of all, oldest first."""
        query = select(ORDERS).where(ORDERS.c.status.in_((GIVEN, TAKEN))).order_by(ORDERS.c.segment)
        if node is not None:
            query = query.where(ORDERS.c.node == node)
        if incarnation is not None:
            query = query.where(ORDERS.c.incarnation == incarnation)
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return [_order(row._mapping) for row in rows]

    def end(self, segment: int, node: str) -> None:
        """Ends an order whose node will not say more: it was withdrawn, or the node is lost."""
        self._database.write(
            lambda connection: connection.execute(
                update(ORDERS).where(ORDERS.c.segment == segment, ORDERS.c.node == node).values(status=ENDED)
            )
        )


def _order(row: Mapping[Any, Any]) -> OrderRecord:
    fields = {key: row[key] for key in ("segment", "node", "batch", "incarnation", "status", "flow_run")}
    return OrderRecord(share=from_json(Share, row["content"]), **fields)
