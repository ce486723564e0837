"""Background launch of each order's child run, so that no caller waits while the task engine is unreachable."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from ringmaster.tasks.storage.message_store import GIVEN, MessageStore, OrderRecord
from ringmaster.techniques.runtime.processes.gang import Outcome

logger = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0
LOOK_AGAIN_S = 5.0  # the interval of checks of an order that no node has taken yet
MOST_AT_ONCE = 2  # concurrent calls to the task engine: on SQLite, more of them block each other for seconds


class RunIsOver(Exception):
    """Raised when the child run of an order ended before a node took the order; `outcome` is the share's outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        super().__init__(outcome.message)


Launch = Callable[[OrderRecord], str]
"""Makes the child run of an order, or finds the one that it made before, and returns the run's id.

Raises ConnectionError while the task engine is unreachable or refuses, and RunIsOver if the run has ended already.
"""


class Launcher:
    """Launches orders, each in a thread of its own.

    on_over: called with an order whose run ended before the order was taken, and with the share's outcome.
    """

    def __init__(
        self, launch: Launch, message_store: MessageStore, *, on_over: Callable[[OrderRecord, Outcome], None]
    ) -> None:
        self._launch, self._message_store, self._on_over = launch, message_store, on_over
        self._gate = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._closing = threading.Event()

    def start(self, order: OrderRecord) -> None:
        """Launches an order and returns at once; a launch is retried until the order is taken or has ended."""
        name = f"launch-{order.segment}-{order.node}"
        threading.Thread(target=self._follow, args=(order,), name=name, daemon=True).start()

    def close(self) -> None:
        """Stops all launches."""
        self._closing.set()

    def _follow(self, order: OrderRecord) -> None:
        try:
            while not self._closing.is_set() and self._is_waiting(order):
                self._launch_once(order)
                # No node takes an order whose run was cancelled, so the run is checked until a node took the order.
                self._closing.wait(LOOK_AGAIN_S)
        except RunIsOver as over:
            if self._message_store.withdraw(order.segment, order.node):
                self._on_over(order, over.outcome)
        except SQLAlchemyError as error:  # this process ends, or may no longer write; another executor continues
            logger.warning("segment %d is left to the next executor: %s", order.segment, error)

    def _launch_once(self, order: OrderRecord) -> None:
        wait_s = FIRST_WAIT_S
        while not self._closing.is_set() and self._is_waiting(order):
            try:
                with self._gate:
                    run = self._launch(order)
            except ConnectionError as error:
                if wait_s == FIRST_WAIT_S:
                    logger.warning("segment %d cannot be launched yet, trying again: %s", order.segment, error)
            else:
                if order.flow_run != run:
                    self._message_store.note_flow_run(order.segment, order.node, run)
                return
            self._closing.wait(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _is_waiting(self, order: OrderRecord) -> bool:
        shares = self._message_store.shares(order.segment)
        return any((share.node, share.status) == (order.node, GIVEN) for share in shares)
