"""Values over time: numbers that hold always, the hours of each day, or rows of a file, and their steps from a moment.

A value of a file holds from its time to the next one; the last one as long as the one before it. Hours of the day are
those of clocks in a time zone, so that the days on which these are put forward or back have 23 or 25 of them.

After the end of a file's values, its last day is repeated by these clocks. Where it has less than a day, its last
value lasts.
"""

import csv
import io
import math
import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain, pairwise
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from ringmaster.codec import SINCE_LATER
from ringmaster.files import text_of

HOURS, HOUR_S, DAY_S = 24, 3600.0, 86_400.0
CLOCK_CHANGE_S = 1800.0  # clocks are put forward and back by multiples of it: on Lord Howe Island by one
COLUMNS = ["time", "value"]
EXAMPLE = "2026-01-31T14:00+01:00"
MAX_VALUE, MIN_VALUE = 1e12, 1e-30  # a planner's limits, with room for units
MAX_ROWS = 110_000  # of a file: a year of five minutes
MAX_FIELD = 1000  # characters

Steps = tuple[tuple[float, float], ...]
"""(seconds from a moment, the value from then on), ascending; the first is at 0, and the last value lasts for ever."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values over time.

    values: one that always holds; or those of the 24 hours of a day, where there is a zone and no times; or of `times`.
    times_s: when each value begins, in seconds since the epoch, ascending.
    ends_s: when the last one ends.
    zone: the time zone of the clocks by which days are repeated, such as "Europe/Berlin".
    """

    values: tuple[float, ...]
    times_s: tuple[float, ...] = ()
    ends_s: float = field(default=math.inf, metadata=SINCE_LATER)  # databases refuse an infinite number
    zone: str = ""

    @classmethod
    def constant(cls, value: float) -> "Series":
        """Returns a value that always holds."""
        return cls(values=(value,))

    def in_words(self) -> str:
        """Returns the least and the largest value, and the times that they are known for."""
        least, most = min(self.values), max(self.values)
        values = f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"
        if self.times_s:
            return f"{values} ({shown_time(self.times_s[0])} to {shown_time(self.ends_s)})"
        return values if len(self.values) == 1 else f"{values} (by the hours of the day in {self.zone})"

    def value_at(self, at_s: float) -> float:
        """Returns the value at a moment, in seconds since the epoch."""
        if len(self.values) == 1:
            return self.values[0]
        if not self.times_s:
            return self.values[_local(at_s, self.zone).hour]
        if at_s >= self.ends_s and self.ends_s - self.times_s[0] >= DAY_S:
            at_s = self._day_before_end(at_s)
        return self.values[max(0, bisect_right(self.times_s, at_s) - 1)]

    def steps(self, from_s: float, *, horizon_s: float) -> Steps:
        """Returns the values from a moment on, for `horizon_s` seconds, as steps from that moment."""
        return tuple(self.each_step(from_s, horizon_s=horizon_s))

    def each_step(self, from_s: float, *, horizon_s: float) -> Iterator[tuple[float, float]]:
        """Yields the steps that `steps` returns."""
        before = math.nan
        for at_s in chain([from_s], self._changes(from_s, from_s + horizon_s)):
            if (value := self.value_at(at_s)) != before:
                yield at_s - from_s, value
            before = value

    def integral(self, from_s: float, to_s: float) -> float:
        """Returns the integral of the value over an interval, in value-seconds."""
        bounds = [from_s, *self._changes(from_s, to_s), max(from_s, to_s)]
        return math.fsum(self.value_at(at_s) * (next_s - at_s) for at_s, next_s in pairwise(bounds))

    def _changes(self, from_s: float, to_s: float) -> Iterator[float]:
        """Yields the moments between two others at which another value may begin."""
        if len(self.values) == 1:
            return
        if not self.times_s:
            yield from _hours(from_s, to_s, zone=self.zone)
            return
        yield from (at_s for at_s in self.times_s[bisect_right(self.times_s, from_s) :] if at_s < to_s)
        if self.ends_s - self.times_s[0] < DAY_S:
            return
        every_s = _common_s(self.ends_s - self.times_s[-1], CLOCK_CHANGE_S)
        at_s = self.ends_s + max(0, math.floor((from_s - self.ends_s) / every_s)) * every_s
        while at_s < to_s:
            if at_s > from_s:
                yield at_s
            at_s += every_s

    def _day_before_end(self, at_s: float) -> float:
        """Returns the moment of the last day of the values at which clocks show what they show at `at_s`."""
        local = _local(at_s, self.zone)
        days = math.floor((at_s - self.ends_s) / DAY_S)
        while (then_s := (local - timedelta(days=days)).timestamp()) >= self.ends_s:
            days += 1
        return then_s


def _common_s(a_s: float, b_s: float) -> float:
    """Returns the longest interval of which both are multiples, in whole microseconds."""
    return math.gcd(round(a_s * 1e6), round(b_s * 1e6)) / 1e6


def _local(at_s: float, zone: str) -> datetime:
    return datetime.fromtimestamp(at_s, ZoneInfo(zone) if zone else UTC)


def _hours(from_s: float, to_s: float, *, zone: str) -> Iterator[float]:
    """Yields when the hours of clocks in a zone begin after a moment. They begin within an hour, whatever the zone."""
    at_s = from_s
    while True:
        local = _local(at_s, zone)
        at_s += HOUR_S - (local.minute * 60 + local.second + local.microsecond / 1e6)
        if at_s >= to_s:
            return
        yield at_s


def shown_time(at_s: float) -> str:
    """Returns a moment as text."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="minutes")


def is_zone(name: str) -> bool:
    """Returns whether a text names a time zone."""
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # zones are files; not every text is a valid file name
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class ReadSeries:
    """A file's values, and what is wrong with its lines; the values are None where anything is."""

    series: Series | None
    faults: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A row of a file. shown_s: what clocks of the zone show, in seconds, where the time names no zone."""

    line: int
    at_s: float
    shown_s: float
    value: float


def read_series(path: Path, *, zone: str, allows_negative: bool) -> ReadSeries:
    """Reads a CSV file with the columns time and value.

    zone: of times that name none; empty where each has to.
    allows_negative: whether values below 0 are read, as 0.

    Raises OSError and ValueError where the file cannot be read as text.
    """
    rows, faults = [], []
    numbered = _numbered_cells(text_of(path))
    header = [name.strip() for name in next(numbered, (1, []))[1]]
    if header != COLUMNS:
        return ReadSeries(series=None, faults=(f"line 1: the columns are {header}, and must be time,value",))
    before_s = -math.inf
    for line, cells in numbered:
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(COLUMNS):
            faults.append(f"line {line}: has {len(cells)} values, and must have 2")
            continue
        try:
            at_s, shown_s = time_of(cells[0].strip(), zone=zone, after_s=before_s)
            value = _value_of(cells[1].strip(), allows_negative=allows_negative)
            rows.append(_Row(line=line, at_s=at_s, shown_s=shown_s, value=value))
            before_s = at_s
        except ValueError as error:
            faults.append(f"line {line}: {error}")
    if len(rows) > MAX_ROWS:
        faults.append(f"line {rows[MAX_ROWS].line}: is row {MAX_ROWS + 1}, and {MAX_ROWS} are the most")
    if len(rows) < 2 and not faults:
        faults.append("line 1: is followed by less than two rows, so that nothing says how long a value holds")
    faults += _order_faults(rows, has_faults=bool(faults))
    if faults:
        return ReadSeries(series=None, faults=tuple(sorted(faults, key=lambda text: int(text.split(":")[0][5:]))))
    every_s = _usual_s([b.at_s - a.at_s for a, b in pairwise(rows)])
    series = Series(
        values=tuple(row.value for row in rows),
        times_s=tuple(row.at_s for row in rows),
        ends_s=rows[-1].at_s + every_s,
        zone=zone,
    )
    return ReadSeries(series=series, faults=())


def _numbered_cells(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yields lines of CSV with their numbers, whatever ends them. Spreadsheets begin UTF-8 with a byte order mark.

    Raises ValueError where a text is no CSV.
    """
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=None))
    try:
        for cells in reader:
            if max(map(len, cells), default=0) > MAX_FIELD:  # csv's own limit is one of the process, which others set
                raise ValueError(f"line {reader.line_num}: field larger than {MAX_FIELD} characters")
            yield reader.line_num, cells
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from None


def _order_faults(rows: Sequence[_Row], *, has_faults: bool) -> Iterator[str]:
    """Yields where rows repeat a time, go back, or leave a hole. A line that cannot be read leaves no hole."""
    gaps = [b.at_s - a.at_s for a, b in pairwise(rows)]
    every_s = _usual_s([gap for gap in gaps if gap > 0])
    for (before, row), gap in zip(pairwise(rows), gaps, strict=True):
        # The days of a zone have 23 to 25 hours. Shorter intervals do not change with its clocks.
        shown_s = row.shown_s - before.shown_s if every_s > HOUR_S else gap
        if gap == 0:
            yield f"line {row.line}: has the time of line {before.line}"
        elif gap < 0:
            yield f"line {row.line}: is earlier than line {before.line}; times must ascend"
        elif every_s not in (gap, shown_s) and not has_faults:
            usual = f"others {every_s:g} s: rows are missing"
            yield f"line {row.line}: comes {gap:g} s after line {before.line}, and {usual}"


def _usual_s(gaps: Sequence[float]) -> float:
    """Returns the seconds between most rows; of several such numbers the least."""
    return min(statistics.multimode(gaps), default=0.0)


def time_of(text: str, *, zone: str, after_s: float = -math.inf) -> tuple[float, float]:
    """Returns a time in seconds since the epoch, and what clocks show then, in seconds too.

    zone: of a text that names none; empty where each has to.
    after_s: the time before it, by which the hour is told that clocks show twice when they are put back.

    Raises ValueError where a text is no time.
    """
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a time, such as {EXAMPLE}") from None
    if at.microsecond:
        raise ValueError(f"{text} has a fraction of a second. Round it")
    if at.tzinfo is None and not zone:
        raise ValueError(f"{text} has no time zone. Add it, as in {EXAMPLE}, or give `time_zone`")
    try:
        return _shown_at(at, zone=zone, after_s=after_s) if at.tzinfo is None else (at.timestamp(), at.timestamp())
    except OverflowError:
        raise ValueError(f"{text} is in the first or the last year that there is") from None


def _shown_at(at: datetime, *, zone: str, after_s: float) -> tuple[float, float]:
    first, second = (at.replace(tzinfo=ZoneInfo(zone), fold=fold) for fold in (0, 1))
    if first.astimezone(UTC).astimezone(ZoneInfo(zone)).replace(tzinfo=None) != at:
        raise ValueError(f"clocks in {zone} do not show {at.isoformat(timespec='minutes')}, as they are put forward")
    is_second = first.timestamp() <= after_s < second.timestamp()
    return (second if is_second else first).timestamp(), at.replace(tzinfo=UTC).timestamp()


def _value_of(text: str, *, allows_negative: bool) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    if value < 0 and not allows_negative:
        raise ValueError(f"{text} is negative")
    if value > MAX_VALUE:
        raise ValueError(f"{text} is larger than {MAX_VALUE:g}")
    return counted(value)


def counted(value: float) -> float:
    """Returns a value as plans count it: at least 0, and 0 where planners could not tell it from that."""
    return value if value >= MIN_VALUE else 0.0
