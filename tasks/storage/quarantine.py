"""Rows of a database that a process fails on: they are set aside, so that the others are handled."""

import logging
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import Journal
from ringmaster.tasks.storage.schema import FACTS
from ringmaster.text import printable_lines

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_FAILURES = 2  # by an exception
MAX_DEATHS = 3  # of the controller's process: more, as it may be ended from outside just then
HANDLING = "handling "  # begins the key of the pool's fact with the number of processes that have begun to handle a row


class Quarantine:
    """Handles rows, such as requests and batches, and sets aside those that the controller fails on.

    A row is marked in the database before it is handled. So a controller that a row ends, by a lack of memory for
    example, is followed by one that knows it. A database that is away is not a fault of a row.
    """

    def __init__(self, database: Database) -> None:
        self._facts = Journal(database, batch="")
        result = database.rows(
            select(FACTS.c.key, FACTS.c.value).where(FACTS.c.batch == "", FACTS.c.key.startswith(HANDLING))
        )
        rows = [row for row in result if isinstance(row.value, list)]
        self._num_begun: dict[str, int] = {row.key.removeprefix(HANDLING): row.value[0] for row in rows}

    def handle(
        self,
        row: str,
        act: Callable[[], T],
        *,
        set_aside: Callable[[str], None],
        most_failures: int = MAX_FAILURES,
        is_marked: bool = True,
    ) -> T | None:
        """Returns the result of `act`, or None where the row is set aside.

        row: the row in words, which are the same in every process, such as "request 7".
        set_aside: is called with the cause if `act` raises `most_failures` times, or ended the processes before.
        is_marked: False where the row is handled too often to be marked.
        """
        num_begun = self._num_begun.get(row, 0)
        if num_begun >= MAX_DEATHS:
            cause = f"the process ended {num_begun} times while it handled it"
        else:
            if is_marked:
                self._mark(row, num_begun + 1)
            for _ in range(most_failures):
                try:
                    result = act()
                except SQLAlchemyError:
                    raise
                except Exception as error:
                    logger.exception("%s cannot be handled", row)
                    cause = f"{type(error).__name__}: {error}"
                else:
                    self._mark(row, 0)
                    return result
        message = printable_lines(f"the pool's controller cannot handle it, and continues without it: {cause}")
        logger.error("%s is set aside: %s", row, message)
        set_aside(message)
        self._mark(row, 0)
        return None

    def _mark(self, row: str, num_begun: int) -> None:
        if num_begun == self._num_begun.get(row, 0):
            return
        self._num_begun[row] = num_begun
        if num_begun:
            self._facts.put(f"{HANDLING}{row}", num_begun)
        else:
            self._facts.remove(f"{HANDLING}{row}")
