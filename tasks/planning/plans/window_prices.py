"""Dual prices that differ between windows of time, and readers of JSON values that name the place of what is wrong.

`bounds.windows` and `bounds.completions` have the formulas.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ringmaster.tasks.planning.problems.problem_validation import shown

LARGEST = 10**18
"""Limit of the integers in a plan."""


def object_at(data: Any, place: str) -> Mapping[str, Any]:
    """Reads an object."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{place} must be an object, not {shown(data)}")
    return data


def list_at(data: Any, place: str) -> list[Any]:
    """Reads a list."""
    if not isinstance(data, list):
        raise ValueError(f"{place} must be a list, not {shown(data)}")
    return data


def text_at(data: Any, place: str) -> str:
    """Reads a string."""
    if not isinstance(data, str):
        raise ValueError(f"{place} must be text, not {shown(data)}")
    return data


def index_at(data: Any, place: str) -> int:
    """Reads an integer from 0 on."""
    if not isinstance(data, int) or isinstance(data, bool) or not 0 <= data <= LARGEST:
        raise ValueError(f"{place} must be a whole number from 0 on, not {shown(data)}")
    return data


def number_at(data: Any, place: str) -> float:
    """Reads a number; NaN and infinity pass, since `verify` reports them."""
    if not isinstance(data, (int, float)) or isinstance(data, bool) or (isinstance(data, int) and abs(data) > LARGEST):
        raise ValueError(f"{place} must be a number, not {shown(data)}")
    return float(data)


def number_or_none_at(data: Any, place: str) -> float | None:
    """Reads a number or null."""
    return None if data is None else number_at(data, place)


def numbers_at(data: Any, place: str) -> tuple[float, ...]:
    """Reads a list of numbers."""
    return tuple(number_at(value, place) for value in list_at(data, place))


def prices_at(data: Any, place: str) -> dict[str, float]:
    """Reads an object of numbers."""
    return {name: number_at(price, f"{place}, {shown(name)}") for name, price in object_at(data, place).items()}


def slot_prices_at(data: Any, place: str) -> dict[int, float]:
    """Reads an object of numbers by sizes of slots."""
    prices = prices_at(data, place)
    if wrong := [slot for slot in prices if not re.fullmatch("[1-9][0-9]{0,8}", slot)]:
        raise ValueError(f"{place} must be by numbers of devices, not by {shown(wrong[0])}")
    return {int(slot): price for slot, price in prices.items()}


def typed_prices_at(data: Any, place: str) -> dict[str, dict[int, float]]:
    """Reads an object of slot prices by device type."""
    return {kind: slot_prices_at(prices, f"{place} of {kind!r}") for kind, prices in object_at(data, place).items()}


Pair = tuple[str, str]  # (a job, a job that waits for it)


@dataclass(frozen=True)
class WindowPrices:
    """Prices by window: window i is from points_s[i] to points_s[i + 1]; the last one has no end.

    slot_prices: for each window, the worth of a slot per second, by device type and by size in devices.
    job_prices: worth of a job's own time, by job id and window.
    order_prices: by pair (before, after) and window, the part of the price of `after` that is earned by the rule that
        the two never run at the same time.
    """

    points_s: tuple[float, ...]
    slot_prices: tuple[Mapping[str, Mapping[int, float]], ...]
    job_prices: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    order_prices: Mapping[Pair, tuple[float, ...]] = field(default_factory=dict)

    def every(self) -> Iterable[float]:
        """Yields all numbers."""
        yield from self.points_s
        yield from self.prices()

    def prices(self) -> Iterable[float]:
        """Yields all prices."""
        for typed in self.slot_prices:
            for prices in typed.values():
                yield from prices.values()
        for row in (*self.job_prices.values(), *self.order_prices.values()):
            yield from row

    def mapped(self, change: Callable[[float], float]) -> "WindowPrices":
        """Returns other prices in the same windows."""
        return replace(
            self,
            slot_prices=tuple(
                {k: _mapped(prices, change) for k, prices in typed.items()} for typed in self.slot_prices
            ),
            job_prices={job: tuple(map(change, row)) for job, row in self.job_prices.items()},
            order_prices={pair: tuple(map(change, row)) for pair, row in self.order_prices.items()},
        )

    def renamed(self, names: Mapping[str, str]) -> "WindowPrices":
        """Returns the prices with other names of jobs."""
        return replace(
            self,
            job_prices={names.get(job, job): row for job, row in self.job_prices.items()},
            order_prices=_renamed_pairs(self.order_prices, names),
        )

    def only(self, names: Collection[str]) -> "WindowPrices":
        """Returns the prices without those of all other jobs."""
        return replace(
            self,
            job_prices={job: row for job, row in self.job_prices.items() if job in names},
            order_prices={(a, b): row for (a, b), row in self.order_prices.items() if a in names and b in names},
        )

    @classmethod
    def from_json(cls, data: Any) -> "WindowPrices":
        """Reads the prices from a JSON object. Raises ValueError where something is missing or of the wrong type."""
        fields = object_at(data, "windows")
        rows = list_at(fields.get("slot_prices"), "windows, slot_prices")
        jobs = object_at(fields.get("job_prices", {}), "windows, job_prices")
        return cls(
            points_s=numbers_at(fields.get("points"), "windows, points"),
            slot_prices=tuple(typed_prices_at(row, f"windows, slot_prices {i}") for i, row in enumerate(rows)),
            job_prices={job: numbers_at(row, f"windows, job_prices of {job!r}") for job, row in jobs.items()},
            order_prices={
                _pair(row, "windows, order_prices"): numbers_at(row.get("prices"), "windows, order_prices")
                for row in list_at(fields.get("order_prices", []), "windows, order_prices")
            },
        )

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads."""
        return {
            "points": list(self.points_s),
            "slot_prices": [
                {kind: {str(slot): price for slot, price in prices.items()} for kind, prices in typed.items()}
                for typed in self.slot_prices
            ],
            "job_prices": {job: list(row) for job, row in self.job_prices.items()},
            "order_prices": [
                {"before": before, "after": after, "prices": list(row)}
                for (before, after), row in self.order_prices.items()
            ],
        }


@dataclass(frozen=True)
class CompletionPrices:
    """Prices that prove a bound on the sum of weight x end; nothing is earned in the last window.

    windows: worth of slots and of the jobs' own time.
    end_prices: the part of a job's weight that is a price of its end, by job id.
    wait_prices: by pair (before, after), the price of the rule that `after` ends all of its own seconds after `before`.
    work_prices: worth of a job's whole work if it ends in a window, by job id and window.
    """

    windows: WindowPrices
    end_prices: Mapping[str, float] = field(default_factory=dict)
    wait_prices: Mapping[Pair, float] = field(default_factory=dict)
    work_prices: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def every(self) -> Iterable[float]:
        """Yields all numbers."""
        yield from self.windows.every()
        yield from self.end_prices.values()
        yield from self.wait_prices.values()
        for row in self.work_prices.values():
            yield from row

    def renamed(self, names: Mapping[str, str]) -> "CompletionPrices":
        """Returns the prices with other names of jobs."""
        return CompletionPrices(
            self.windows.renamed(names),
            {names.get(job, job): price for job, price in self.end_prices.items()},
            _renamed_pairs(self.wait_prices, names),
            {names.get(job, job): row for job, row in self.work_prices.items()},
        )

    @classmethod
    def from_json(cls, data: Any) -> "CompletionPrices":
        """Reads the prices from a JSON object. Raises ValueError where something is missing or of the wrong type."""
        fields = object_at(data, "completions")
        work = object_at(fields.get("work_prices", {}), "completions, work_prices")
        return cls(
            windows=WindowPrices.from_json(fields.get("windows")),
            end_prices=prices_at(fields.get("end_prices", {}), "completions, end_prices"),
            wait_prices={
                _pair(row, "completions, wait_prices"): number_at(row.get("price"), "completions, wait_prices")
                for row in list_at(fields.get("wait_prices", []), "completions, wait_prices")
            },
            work_prices={job: numbers_at(row, f"completions, work_prices of {job!r}") for job, row in work.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads."""
        return {
            "windows": self.windows.to_json(),
            "end_prices": dict(self.end_prices),
            "wait_prices": [{"before": a, "after": b, "price": price} for (a, b), price in self.wait_prices.items()],
            "work_prices": {job: list(row) for job, row in self.work_prices.items()},
        }


def _mapped(prices: Mapping[int, float], change: Callable[[float], float]) -> dict[int, float]:
    return {slot: change(price) for slot, price in prices.items()}


def _pair(data: Any, place: str) -> Pair:
    row = object_at(data, place)
    return text_at(row.get("before"), f"{place}, before"), text_at(row.get("after"), f"{place}, after")


def _renamed_pairs(prices: Mapping[Pair, Any], names: Mapping[str, str]) -> dict[Pair, Any]:
    return {(names.get(a, a), names.get(b, b)): price for (a, b), price in prices.items()}
