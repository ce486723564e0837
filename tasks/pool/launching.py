"""Starts the child run of each order, in the background: the task engine may be away, and nobody waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from ringmaster.tasks.pool.mail import GIVEN, Mail, OrderRecord
from ringmaster.techniques.engine.gang import Outcome

logger = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0
LOOK_AGAIN_S = 5.0  # at the run of an order that nobody has taken yet
MOST_AT_ONCE = 2  # calls to the task engine: on SQLite more than that lock each other out, for seconds


class RunIsOver(Exception):
    """The child run of an order came to an end before any node took it; `outcome` says what that means for it."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        super().__init__(outcome.message)


Launch = Callable[[OrderRecord], str]
"""Makes the child run of an order, or finds the one that it made before, and returns its id.

Raises ConnectionError while the task engine is away or refuses, and RunIsOver where the run has ended already.
"""


class Launcher:
    """Launches orders, each in a thread of its own. on_over: told of orders whose run ended before they were taken."""

    def __init__(self, launch: Launch, mail: Mail, *, on_over: Callable[[OrderRecord, Outcome], None]) -> None:
        self._launch, self._mail, self._on_over = launch, mail, on_over
        self._gate = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._closing = threading.Event()

    def start(self, order: OrderRecord) -> None:
        """Launches an order, tried again until it is taken or has ended; returns at once."""
        name = f"launch-{order.segment}-{order.node}"
        threading.Thread(target=self._follow, args=(order,), name=name, daemon=True).start()

    def close(self) -> None:
        """Launches nothing more."""
        self._closing.set()

    def _follow(self, order: OrderRecord) -> None:
        try:
            while not self._closing.is_set() and self._is_waiting(order):
                self._launch_once(order)
                # Nobody takes an order whose run was cancelled: it is looked at again until somebody has.
                self._closing.wait(LOOK_AGAIN_S)
        except RunIsOver as over:
            if self._mail.withdraw(order.segment, order.node):
                self._on_over(order, over.outcome)
        except SQLAlchemyError as error:  # this process ends, or must not write any more: another one goes on
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
                    self._mail.note_flow_run(order.segment, order.node, run)
                return
            self._closing.wait(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _is_waiting(self, order: OrderRecord) -> bool:
        shares = self._mail.shares(order.segment)
        return any((share.node, share.status) == (order.node, GIVEN) for share in shares)
