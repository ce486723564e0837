"""Dual prices that differ between windows of time; `bounds.windows` and `bounds.completions` have the formulas."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ringmaster.tasks.planning.plans.reading import (
    list_at,
    number_at,
    numbers_at,
    object_at,
    prices_at,
    text_at,
    typed_prices_at,
)

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
        said = object_at(data, "windows")
        rows = list_at(said.get("slot_prices"), "windows, slot_prices")
        jobs = object_at(said.get("job_prices", {}), "windows, job_prices")
        return cls(
            points_s=numbers_at(said.get("points"), "windows, points"),
            slot_prices=tuple(typed_prices_at(row, f"windows, slot_prices {i}") for i, row in enumerate(rows)),
            job_prices={job: numbers_at(row, f"windows, job_prices of {job!r}") for job, row in jobs.items()},
            order_prices={
                _pair(row, "windows, order_prices"): numbers_at(row.get("prices"), "windows, order_prices")
                for row in list_at(said.get("order_prices", []), "windows, order_prices")
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
        said = object_at(data, "completions")
        work = object_at(said.get("work_prices", {}), "completions, work_prices")
        return cls(
            windows=WindowPrices.from_json(said.get("windows")),
            end_prices=prices_at(said.get("end_prices", {}), "completions, end_prices"),
            wait_prices={
                _pair(row, "completions, wait_prices"): number_at(row.get("price"), "completions, wait_prices")
                for row in list_at(said.get("wait_prices", []), "completions, wait_prices")
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
