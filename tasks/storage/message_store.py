"""Messages between a pool's controller and its nodes: orders and commands to nodes, events of gangs to the executor.

The messages are in the pool's database, so they outlive both sides. An executor that comes back reads on where it
stopped, and a node that was cut off finds the messages that it missed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from ringmaster.codec import from_json, to_json
from ringmaster.tasks.storage.database import Database, delete_in_chunks, json_values
from ringmaster.tasks.storage.schema import COMMANDS, GANG_EVENTS, ORDERS
from ringmaster.techniques.processes.gang_events import Event, Outcome, event_or_refusal, event_to_json
from ringmaster.techniques.processes.order import GangOrder

KILL = "kill"  # the command to end the gang at once
WORDS_A_PAGE = 2000  # events per read transaction: a server ends transactions whose results are processed slowly


class OrderStatus(StrEnum):
    """The states of an order."""

    GIVEN = "given"
    TAKEN = "taken"  # by the worker of its node
    ENDED = "ended"  # its outcome was reported, or its node is lost
    WITHDRAWN = "withdrawn"  # before a node took it


@dataclass(frozen=True, kw_only=True)
class GangShare:
    """A node's part of a gang: as many ranks, from the first one of its order on.

    order: the order of the whole gang, but with the slots and the first rank of this node alone.
    """

    order: GangOrder
    num_ranks: int


@dataclass(frozen=True, kw_only=True)
class OrderRecord:
    """An order as stored in the database. content: the JSON form of its share."""

    segment: int
    node: str
    batch: str
    content: Mapping[str, Any]
    incarnation: str
    status: OrderStatus

    @property
    def first_rank(self) -> int:
        """The first rank of its share, as far as that can be read."""
        order = self.content.get("order") if isinstance(self.content, Mapping) else None
        first = order.get("first_rank") if isinstance(order, Mapping) else None
        return first if isinstance(first, int) else 0

    @property
    def share(self) -> GangShare:
        """The node's part of the gang. Raises ValueError where it cannot be read."""
        return from_json(GangShare, self.content)


@dataclass(frozen=True, kw_only=True)
class GangEvent:
    """An event that a gang reported.

    id: grows over the events of all gangs.
    number: counts the events of one share from 0.
    """

    id: int
    segment: int
    node: str
    number: int
    content: Event


class MessageStore:
    """The messages in both directions. Segment numbers are those of the journal. All methods are thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # -- the executor's side -----------------------------------------------------------------------------------------

    def give(self, segment: int, *, batch: str, shares: Mapping[str, tuple[str, GangShare]]) -> None:
        """Orders a segment.

        shares: by node, the incarnation that is to take the order, and its share of the gang.
        """

        for node, (incarnation, share) in shares.items():
            row = {"segment": segment, "node": node, "batch": batch, "content": to_json(share)}
            self._database.insert_later(ORDERS, **row, incarnation=incarnation, status=OrderStatus.GIVEN)

    def command(self, segment: int, command: str) -> None:
        """Sends a command to a segment's gang, on all its nodes."""
        self._database.insert_later(COMMANDS, segment=segment, command=command)

    def events(self, *, after: int, segments: Collection[int] | None = None) -> Sequence[GangEvent]:
        """Returns the events of gangs after the event with that id, in order: of all segments, or of some."""
        result: list[GangEvent] = []
        while True:
            page = self._page(after=result[-1].id if result else after, segments=segments)
            result += page
            if len(page) < WORDS_A_PAGE:
                return result

    def _page(self, *, after: int, segments: Collection[int] | None) -> list[GangEvent]:
        query = select(GANG_EVENTS).where(GANG_EVENTS.c.id > after).order_by(GANG_EVENTS.c.id).limit(WORDS_A_PAGE)
        if segments is not None:
            query = query.where(GANG_EVENTS.c.segment.in_(segments))
        return [
            GangEvent(
                id=row.id,
                segment=row.segment,
                node=row.node,
                number=row.number,
                content=event_or_refusal(row.content),
            )
            for row in self._database.rows(query)
        ]

    def newest_event(self) -> int:
        """Returns the id of the newest event, 0 if there is none."""
        return self._database.scalar(select(func.max(GANG_EVENTS.c.id))) or 0

    def shares(self, segment: int) -> Sequence[OrderRecord]:
        """Returns the orders of a segment, including ended ones, by their first rank."""
        rows = self._database.rows(select(ORDERS).where(ORDERS.c.segment == segment))
        return sorted((_order(row._mapping) for row in rows), key=lambda order: order.first_rank)

    def withdraw(self, segment: int, node: str) -> bool:
        """Withdraws an order; returns False if the order was taken or has ended before."""
        own = (ORDERS.c.segment == segment) & (ORDERS.c.node == node)

        def act(connection: Connection) -> bool:
            connection.execute(
                update(ORDERS).where(own, ORDERS.c.status == OrderStatus.GIVEN).values(status=OrderStatus.WITHDRAWN)
            )
            return connection.execute(select(ORDERS.c.status).where(own)).scalar() == OrderStatus.WITHDRAWN

        return self._database.write(act)

    def batches(self) -> set[str]:
        """Returns the batches that have orders, including ended ones."""
        return set(self._database.scalars(select(ORDERS.c.batch).distinct()))

    def clear(self, batch: str) -> None:
        """Deletes the events, commands and orders of a batch's segments, all of which have ended.

        The newest event and the newest command stay: SQLite would assign their numbers again, and a reader that has
        read up to them would miss the next ones.
        """

        segments = select(ORDERS.c.segment).where(ORDERS.c.batch == batch)
        for table in (GANG_EVENTS, COMMANDS):
            newest = select(func.max(table.c.id)).scalar_subquery()
            delete_in_chunks(self._database, table, table.c.segment.in_(segments) & (table.c.id < newest))
        self._database.execute(delete(ORDERS).where(ORDERS.c.batch == batch))

    # -- a node's side -----------------------------------------------------------------------------------------------

    def take(self, segment: int, node: str, *, incarnation: str) -> GangShare | None:
        """Takes an order; returns None if the order is for another incarnation, or was taken or withdrawn already.

        Raises ValueError where the order cannot be read.
        """

        def act(connection: Connection) -> Any:
            own = (ORDERS.c.segment == segment) & (ORDERS.c.node == node) & (ORDERS.c.incarnation == incarnation)
            done = connection.execute(
                update(ORDERS).where(own, ORDERS.c.status == OrderStatus.GIVEN).values(status=OrderStatus.TAKEN)
            )
            if not done.rowcount:
                return None
            return connection.execute(select(ORDERS.c.content).where(own)).scalar_one()

        content = self._database.write(act)
        return None if content is None else from_json(GangShare, content)

    def store(self, segment: int, node: str, *, events: Sequence[tuple[int, Event]]) -> None:
        """Stores events of a share's gang, each with its number; events that are stored already are skipped.

        A `Outcome` ends the order.
        """

        def act(connection: Connection) -> None:
            here = (GANG_EVENTS.c.segment == segment) & (GANG_EVENTS.c.node == node)
            known = connection.execute(select(func.max(GANG_EVENTS.c.number)).where(here)).scalar()
            for number, content in events:
                if known is None or number > known:
                    row = {
                        "segment": segment,
                        "node": node,
                        "number": number,
                        "content": json_values(event_to_json(content), may_have_nan=False),
                    }
                    connection.execute(insert(GANG_EVENTS).values(**row))
            if any(isinstance(content, Outcome) for _, content in events):
                share = (ORDERS.c.segment == segment) & (ORDERS.c.node == node)
                connection.execute(update(ORDERS).where(share).values(status=OrderStatus.ENDED))

        self._database.write(act)

    def commands(self, *, after: int) -> Sequence[tuple[int, int, str]]:
        """Returns (id, segment, command) of all commands after that id, in order."""
        query = select(COMMANDS).where(COMMANDS.c.id > after).order_by(COMMANDS.c.id)
        return [(row.id, row.segment, row.command) for row in self._database.rows(query)]

    # -- both --------------------------------------------------------------------------------------------------------

    def orders(self, *, incarnation: str | None = None) -> Sequence[OrderRecord]:
        """Returns the orders that have not ended, of one incarnation of a node or of all, the oldest first."""
        query = select(ORDERS).where(ORDERS.c.status.in_((OrderStatus.GIVEN, OrderStatus.TAKEN)))
        query = query if incarnation is None else query.where(ORDERS.c.incarnation == incarnation)
        return [_order(row._mapping) for row in self._database.rows(query.order_by(ORDERS.c.segment))]

    def end(self, segment: int, node: str) -> None:
        """Ends an order whose node will report nothing more, because the order was withdrawn or the node is lost."""
        here = (ORDERS.c.segment == segment) & (ORDERS.c.node == node)
        self._database.execute_later(update(ORDERS).where(here).values(status=OrderStatus.ENDED))


def _order(row: Mapping[Any, Any]) -> OrderRecord:
    fields = {key: row[key] for key in ("segment", "node", "batch", "content", "incarnation")}
    return OrderRecord(status=OrderStatus(row["status"]), **fields)
