"""Plans: which job runs where, when and under which option, with a lower bound and its certificate."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from ringmaster.tasks.planning.problems.problem_parts import shown

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
                {k: {slot: change(price) for slot, price in prices.items()} for k, prices in typed.items()}
                for typed in self.slot_prices
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


def _renamed_pairs(prices: Mapping[Pair, Any], names: Mapping[str, str]) -> dict[Pair, Any]:
    return {(names.get(a, a), names.get(b, b)): price for (a, b), price in prices.items()}


def _pair(data: Any, place: str) -> Pair:
    row = object_at(data, place)
    return text_at(row.get("before"), f"{place}, before"), text_at(row.get("after"), f"{place}, after")


@dataclass(frozen=True)
class Segment:
    """One job on one gang under one option, from `start_s` to `end_s`.

    option: index into the job's options.
    work: share of the whole job that the segment does.
    overhead_s: seconds of the segment that do no work: start-up, save, evaluation, and the switch cost of a job that
        continues elsewhere.
    devices: ((node id, (device ids...)), ...), one entry per node.
    """

    job: str
    option: int
    start_s: float
    end_s: float
    work: float
    overhead_s: float
    devices: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def duration_s(self) -> float:
        """Seconds for which the gang holds its devices."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Certificate:
    """Dual prices that prove a lower bound by arithmetic alone; `bounds.bounds` has the formulas.

    slot_prices: worth of a slot per second, by its size in devices.
    job_prices: worth of a job's own time, by job id.
    work_prices: worth of a job's whole work, by job id; where there are any, they are the proof, and the others are
        empty.
    typed_prices: slot prices by device type of the node, where there are several types.
    cover_prices: worth of a job's whole work, by job id, where options train several jobs; used with slot and job
        prices.
    windows: prices by window of time; where there are any, they are the proof, and the others are empty.
    completions: prices that prove a bound on the sum of weight x end; the others are then empty.
    due: prices by window between due dates, which prove a bound on the largest of factor x end; the others are then
        empty.
    """

    slot_prices: Mapping[int, float] = field(default_factory=dict)
    job_prices: Mapping[str, float] = field(default_factory=dict)
    work_prices: Mapping[str, float] = field(default_factory=dict)
    typed_prices: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    cover_prices: Mapping[str, float] = field(default_factory=dict)
    windows: WindowPrices | None = None
    completions: CompletionPrices | None = None
    due: WindowPrices | None = None

    def prices_of(self, device_type: str) -> Mapping[int, float]:
        """Slot prices on nodes of a device type."""
        return self.typed_prices.get(device_type, self.slot_prices)

    @property
    def has_slot_prices(self) -> bool:
        """Whether there are prices of slots that hold at any time."""
        return bool(self.slot_prices or self.typed_prices)

    def renamed(self, names: Mapping[str, str]) -> "Certificate":
        """Returns the certificate with other names of jobs; jobs that `names` leaves out keep theirs."""

        def by_new_name(prices: Mapping[str, float]) -> dict[str, float]:
            return {names.get(job, job): price for job, price in prices.items()}

        return replace(
            self,
            job_prices=by_new_name(self.job_prices),
            work_prices=by_new_name(self.work_prices),
            cover_prices=by_new_name(self.cover_prices),
            windows=self.windows and self.windows.renamed(names),
            completions=self.completions and self.completions.renamed(names),
            due=self.due and self.due.renamed(names),
        )

    def only(self, names: Collection[str]) -> "Certificate":
        """Returns the certificate without the prices of all other jobs, for bounds on the last end of some."""

        def of_names(prices: Mapping[str, float]) -> dict[str, float]:
            return {job: price for job, price in prices.items() if job in names}

        return replace(
            self,
            job_prices=of_names(self.job_prices),
            work_prices=of_names(self.work_prices),
            cover_prices=of_names(self.cover_prices),
            windows=self.windows and self.windows.only(names),
            completions=None,
            due=None,
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Certificate":
        """Reads a certificate from a JSON object. Raises ValueError where the object is not a certificate."""
        fields = object_at(data, "certificate")
        jobs = {key: prices_at(fields.get(key, {}), key) for key in ("job_prices", "work_prices", "cover_prices")}
        return cls(
            slot_prices=slot_prices_at(fields.get("slot_prices", {}), "slot_prices"),
            typed_prices=typed_prices_at(fields.get("typed_prices", {}), "typed_prices"),
            windows=WindowPrices.from_json(fields["windows"]) if "windows" in fields else None,
            completions=CompletionPrices.from_json(fields["completions"]) if "completions" in fields else None,
            due=WindowPrices.from_json(fields["due"]) if "due" in fields else None,
            **jobs,
        )

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads."""
        if self.work_prices:
            return {"work_prices": dict(self.work_prices)}
        if self.windows:
            return {"windows": self.windows.to_json()}
        if self.completions:
            return {"completions": self.completions.to_json()}
        if self.due:
            return {"due": self.due.to_json()}
        typed = {
            kind: {str(slot): price for slot, price in prices.items()} for kind, prices in self.typed_prices.items()
        }
        return {
            "slot_prices": {str(slot): price for slot, price in self.slot_prices.items()},
            "job_prices": dict(self.job_prices),
            **({"typed_prices": typed} if typed else {}),
            **({"cover_prices": dict(self.cover_prices)} if self.cover_prices else {}),
        }


@dataclass(frozen=True)
class Plan:
    """Segments in the order of their starts, and a lower bound for plans of this kind.

    lower_bound_s: seconds; None where no bound was proved.
    certificate: prices that prove that bound by arithmetic; None where the bound rests on a proof of another kind, such
        as a solver's, which `proof` names.
    proof: the name of the proof.
    method: the name of the method that found the plan.
    seconds: planning time by stage; two plans that differ only here are equal.
    solver_bound_s: a further lower bound in seconds, on plans that split no job, which a solver or a search has proved
        and arithmetic cannot check; None where there is none. `solver` is the name of its method.
    objective, value, value_bound: the objective where it is not the makespan, its value, and a bound on its value.
    value_certificate: prices that prove the part of that bound that is a sum of weight x end; where there is none, the
        part that is a maximum of factor x end.
    """

    problem_name: str
    segments: tuple[Segment, ...]
    lower_bound_s: float | None = None
    certificate: Certificate | None = None
    proof: str = ""
    method: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    objective: str = "makespan"
    value: float | None = None
    value_bound: float | None = None
    value_certificate: Certificate | None = None
    solver_bound_s: float | None = None
    solver: str = ""

    @property
    def best_bound_s(self) -> float | None:
        """The better of the lower bounds in seconds; None where there is none."""
        return max((each for each in (self.lower_bound_s, self.solver_bound_s) if each is not None), default=None)

    @property
    def makespan_s(self) -> float:
        """End of the last segment, in seconds from the start of the plan."""
        return max((segment.end_s for segment in self.segments), default=0.0)

    @property
    def gap(self) -> float | None:
        """How far the objective may be above the best possible, as a share of the bound; None without a bound."""
        value, bound = self.value, self.value_bound
        if value is None:
            value, bound = self.makespan_s, self.best_bound_s
        return max(0.0, value / bound - 1.0) if bound and bound > 0 else None

    @property
    def num_switches(self) -> int:
        """How often jobs stop and continue under another option or on other devices."""
        return sum(self.num_switches_of(job) for job in {segment.job for segment in self.segments})

    def num_switches_of(self, job: str) -> int:
        """Counts the switches of one job.

        A segment that continues the previous one without a pause, under its option and on its devices, is no switch.
        """
        own_segments = self.segments_of(job)
        return sum(
            a.option != b.option or set(a.devices) != set(b.devices) or b.start_s - a.end_s > 1e-6 * b.end_s
            for a, b in pairwise(own_segments)
        )

    def segments_of(self, job: str) -> tuple[Segment, ...]:
        """Returns a job's segments in the order of their starts."""
        return tuple(sorted((s for s in self.segments if s.job == job), key=lambda s: (s.start_s, s.end_s)))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """Reads a plan from a JSON object. Raises ValueError that names what is missing or of the wrong type."""
        try:
            return _plan(object_at(data, "it"))
        except ValueError as error:
            raise ValueError(f"not a plan: {error}. To fix: give what `ringmaster plan -o` wrote") from error

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads."""
        proved = self.certificate.to_json() if self.certificate else None
        is_plain = proved is not None and proved.keys() == {"slot_prices", "job_prices"}
        return {
            "instance": self.problem_name,
            "makespan": self.makespan_s,
            "lower_bound": self.lower_bound_s,
            # The key "certificate" holds slot and job prices only; others have a key of their own.
            "certificate": proved if is_plain else None,
            **({"extended_certificate": proved} if proved and not is_plain else {}),
            "proof": self.proof,
            "method": self.method,
            "seconds": dict(self.seconds),
            "objective": self.objective,
            "value": self.value,
            "value_bound": self.value_bound,
            **({"solver_bound": self.solver_bound_s, "solver": self.solver} if self.solver else {}),
            **({"value_certificate": self.value_certificate.to_json()} if self.value_certificate else {}),
            "segments": [
                {
                    "job": s.job,
                    "option": s.option,
                    "start": s.start_s,
                    "end": s.end_s,
                    "work": s.work,
                    "overhead": s.overhead_s,
                    "gpus": [[node, list(ids)] for node, ids in s.devices],
                }
                for s in self.segments
            ],
        }


def _plan(data: Mapping[str, Any]) -> Plan:
    certificate = data.get("certificate") or data.get("extended_certificate")
    rows = list_at(data.get("segments"), "segments")
    plan = Plan(
        problem_name=text_at(data.get("instance"), "instance"),
        segments=tuple(_segment(row, f"segment {i}") for i, row in enumerate(rows)),
        lower_bound_s=number_or_none_at(data.get("lower_bound"), "lower_bound"),
        certificate=Certificate.from_json(certificate) if certificate else None,
        proof=text_at(data.get("proof", ""), "proof"),
        method=text_at(data.get("method", ""), "method"),
        seconds=prices_at(data.get("seconds", {}), "seconds"),
        objective=text_at(data.get("objective", "makespan"), "objective"),
        value=number_or_none_at(data.get("value"), "value"),
        value_bound=number_or_none_at(data.get("value_bound"), "value_bound"),
        value_certificate=Certificate.from_json(of_value) if (of_value := data.get("value_certificate")) else None,
        solver_bound_s=number_or_none_at(data.get("solver_bound"), "solver_bound"),
        solver=text_at(data.get("solver", ""), "solver"),
    )
    claimed_s = number_or_none_at(data.get("makespan"), "makespan")
    if claimed_s is not None and not abs(claimed_s - plan.makespan_s) <= max(0.01, 1e-6 * abs(plan.makespan_s)):
        raise ValueError(f"its makespan is {claimed_s}, but its last segment ends at {plan.makespan_s}")
    return plan


def _segment(data: Any, place: str) -> Segment:
    row = object_at(data, place)
    devices = []
    for item in list_at(row.get("gpus"), f"{place}, gpus"):
        node, ids = item if isinstance(item, list) and len(item) == 2 else (None, None)
        ids = [index_at(device, f"{place}, gpus") for device in list_at(ids, f"{place}, gpus")]
        devices.append((text_at(node, f"{place}, gpus"), tuple(ids)))
    return Segment(
        job=text_at(row.get("job"), f"{place}, job"),
        option=index_at(row.get("option"), f"{place}, option"),
        start_s=number_at(row.get("start"), f"{place}, start"),
        end_s=number_at(row.get("end"), f"{place}, end"),
        work=number_at(row.get("work"), f"{place}, work"),
        overhead_s=number_at(row.get("overhead", 0.0), f"{place}, overhead"),
        devices=tuple(devices),
    )
