"""Windows over a data set's rows: the newest days, the last rows, or the rows between two times.

Days count back from the newest row, not from now: the same files give the same window at any time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Any, TypeVar

KEYS = ("last_days", "last_rows", "since", "until")
DAY_S = 86_400.0

T = TypeVar("T")


def in_window(
    rows: Callable[[], Iterable[T]], window: Mapping[str, Any] | None, *, moment_s: Callable[[T], float]
) -> Iterator[T]:
    """Yields the rows that lie in a window, in order; without a window, all rows.

    rows: returns all rows, each time it is called.
    moment_s: the time of a row in seconds since the epoch; may raise ValueError.
    """
    if not window:
        yield from rows()
        return
    if (num_rows := window.get("last_rows")) is not None:
        # Counted first: the last rows may be more than memory holds.
        num_before = max(sum(1 for _ in rows()) - int(num_rows), 0)
        yield from islice(rows(), num_before, None)
        return
    first_s, last_s = moment(window.get("since"), -math.inf), moment(window.get("until"), math.inf)
    if (days := window.get("last_days")) is not None:
        newest_s = max((moment_s(row) for row in rows()), default=0.0)
        first_s = newest_s - days * DAY_S
    for row in rows():
        if first_s <= moment_s(row) < last_s:
            yield row


def moment(value: Any, default: float | None = None) -> float:
    """Converts a number of seconds, an ISO 8601 text or a date into seconds since the epoch; UTC without a time zone.

    Raises ValueError for other values. If `default` is given, it is the result for None.
    """
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or value is None:
        raise ValueError(f"{value!r} is no moment")
    if isinstance(value, (int, float)):
        return float(value)
    if hasattr(value, "isoformat"):
        value = value.isoformat()
    try:
        read = datetime.fromisoformat(str(value))
    except ValueError:
        raise ValueError(f"{value!r} is no moment: write it as 2026-01-31 or 2026-01-31T12:00:00Z") from None
    return (read if read.tzinfo is not None else read.replace(tzinfo=UTC)).timestamp()
