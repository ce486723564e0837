"""Plans: which job runs where, when and under which option, with a lower bound and its certificate."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any

from pydantic import Field, Strict, TypeAdapter, ValidationError

from ringmaster.tasks.planning.problems.problem_parts import shown
from ringmaster.text import join_limited

LARGEST = 10**18
"""Limit of the integers in a plan."""

Index = Annotated[int, Strict(), Field(ge=0, le=LARGEST)]
Number = Annotated[float, Strict()]  # NaN and infinity pass, since `verify` reports them
SlotPrices = Mapping[Annotated[int, Field(ge=1, lt=10**9)], Number]
"""Prices by the size of a slot in devices."""
PerWindow = tuple[Number, ...]


@dataclass(frozen=True)
class WindowPrices:
    """Prices by window: window i is from points_s[i] to points_s[i + 1]; the last one has no end.

    slot_prices: for each window, the worth of a slot per second, by device type and by size in devices.
    job_prices: worth of a job's own time, by job id and window.
    order_prices: by job that waits, job that it waits for, and window, the part of the price of the first that is
        earned by the rule that the two never run at the same time.
    """

    points_s: Annotated[PerWindow, Field(alias="points")]
    slot_prices: tuple[Mapping[str, SlotPrices], ...]
    job_prices: Mapping[str, PerWindow] = field(default_factory=dict)
    order_prices: Mapping[str, Mapping[str, PerWindow]] = field(default_factory=dict)

    def every(self) -> Iterable[float]:
        """Yields all numbers."""
        yield from self.points_s
        yield from self.prices()

    def prices(self) -> Iterable[float]:
        """Yields all prices."""
        for typed in self.slot_prices:
            for prices in typed.values():
                yield from prices.values()
        for row in (*self.job_prices.values(), *(row for rows in self.order_prices.values() for row in rows.values())):
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
            order_prices={
                job: {other: tuple(map(change, row)) for other, row in rows.items()}
                for job, rows in self.order_prices.items()
            },
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
            order_prices={
                job: {other: row for other, row in rows.items() if other in names}
                for job, rows in self.order_prices.items()
                if job in names
            },
        )


@dataclass(frozen=True)
class CompletionPrices:
    """Prices that prove a bound on the sum of weight x end; nothing is earned in the last window.

    windows: worth of slots and of the jobs' own time.
    end_prices: the part of a job's weight that is a price of its end, by job id.
    wait_prices: by job that waits and job that it waits for, the price of the rule that the first ends all of its own
        seconds after the other.
    work_prices: worth of a job's whole work if it ends in a window, by job id and window.
    """

    windows: WindowPrices
    end_prices: Mapping[str, Number] = field(default_factory=dict)
    wait_prices: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    work_prices: Mapping[str, PerWindow] = field(default_factory=dict)

    def every(self) -> Iterable[float]:
        """Yields all numbers."""
        yield from self.windows.every()
        yield from self.end_prices.values()
        for prices in self.wait_prices.values():
            yield from prices.values()
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


def _renamed_pairs(prices: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    return {
        names.get(job, job): {names.get(other, other): price for other, price in rows.items()}
        for job, rows in prices.items()
    }


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
    option: Index
    start_s: Annotated[Number, Field(alias="start")]
    end_s: Annotated[Number, Field(alias="end")]
    work: Number
    overhead_s: Annotated[Number, Field(alias="overhead")] = 0.0
    devices: Annotated[tuple[tuple[str, tuple[Index, ...]], ...], Field(alias="gpus")] = ()

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
    quota_prices: worth of a device per second while a group with a quota holds it, by group; used with slot and job
        prices.
    windows: prices by window of time; where there are any, they are the proof, and the others are empty.
    completions: prices that prove a bound on the sum of weight x end; the others are then empty.
    due: prices by window between due dates, which prove a bound on the largest of factor x end; the others are then
        empty.
    of_objective: what an objective that has its own proof reads itself; the others are then empty.
    """

    slot_prices: SlotPrices = field(default_factory=dict)
    job_prices: Mapping[str, Number] = field(default_factory=dict)
    work_prices: Mapping[str, Number] = field(default_factory=dict)
    typed_prices: Mapping[str, SlotPrices] = field(default_factory=dict)
    cover_prices: Mapping[str, Number] = field(default_factory=dict)
    windows: WindowPrices | None = None
    completions: CompletionPrices | None = None
    due: WindowPrices | None = None
    quota_prices: Mapping[str, Number] = field(default_factory=dict)
    of_objective: Mapping[str, Any] = field(default_factory=dict)

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
    def from_json(cls, data: Any) -> "Certificate":
        """Reads a certificate from a JSON object. Raises ValueError where the object is not a certificate."""
        return TypeAdapter(cls).validate_python(data)

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads: the prices that are the proof."""
        data = TypeAdapter(Certificate).dump_python(self, mode="json", by_alias=True, exclude_defaults=True)
        is_by_slot = data.keys().isdisjoint(("work_prices", "windows", "completions", "due", "of_objective"))
        return {"slot_prices": {}, "job_prices": {}, **data} if is_by_slot else data


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

    problem_name: Annotated[str, Field(alias="instance")]
    segments: tuple[Segment, ...]
    lower_bound_s: Annotated[Number | None, Field(alias="lower_bound")] = None
    certificate: Certificate | None = None
    proof: str = ""
    method: str = ""
    seconds: Mapping[str, Number] = field(default_factory=dict, compare=False)
    objective: str = "makespan"
    value: Number | None = None
    value_bound: Number | None = None
    value_certificate: Certificate | None = None
    solver_bound_s: Annotated[Number | None, Field(alias="solver_bound")] = None
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
        """How far the objective may be above the optimum, as a share of the bound; None without a bound."""
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

        A segment that continues the previous one without a pause, under its option and on its devices, is not a switch.
        """
        return sum(
            a.option != b.option or set(a.devices) != set(b.devices) or b.start_s - a.end_s > 1e-6 * b.end_s
            for a, b in pairwise(self.segments_of(job))
        )

    def segments_of(self, job: str) -> tuple[Segment, ...]:
        """Returns a job's segments in the order of their starts."""
        return tuple(sorted((s for s in self.segments if s.job == job), key=lambda s: (s.start_s, s.end_s)))

    @classmethod
    def from_json(cls, data: Any) -> "Plan":
        """Reads a plan from a JSON object. Raises ValueError with everything that is missing or of the wrong type."""
        fields = dict(data) if isinstance(data, Mapping) else data
        if isinstance(fields, dict):
            fields["certificate"] = fields.get("certificate") or fields.get("extended_certificate")
        try:
            plan = _PLAN.validate_python(fields)
            claimed_s = _CLAIM.validate_python(fields.get("makespan"))
            if claimed_s is not None and not abs(claimed_s - plan.makespan_s) <= max(0.01, 1e-6 * plan.makespan_s):
                raise ValueError(f"its makespan is {claimed_s}, but its last segment ends at {plan.makespan_s}")
        except ValueError as error:
            faults = map(_fault, error.errors()) if isinstance(error, ValidationError) else [error]
            what = join_limited(list(faults), between="; ")
            raise ValueError(f"not a plan: {what}. To fix: give what `ringmaster plan -o` wrote") from error
        return plan

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads."""
        data = _PLAN.dump_python(self, mode="json", by_alias=True, exclude={"certificate", "value_certificate"})
        proved = self.certificate.to_json() if self.certificate else None
        is_plain = proved is not None and proved.keys() == {"slot_prices", "job_prices"}
        return {
            **data,
            "makespan": self.makespan_s,
            # The key "certificate" holds slot and job prices only; others have a key of their own.
            "certificate": proved if is_plain else None,
            **({"extended_certificate": proved} if proved and not is_plain else {}),
            **({"value_certificate": self.value_certificate.to_json()} if self.value_certificate else {}),
        }


_PLAN: TypeAdapter[Plan] = TypeAdapter(Plan)
_CLAIM: TypeAdapter[float | None] = TypeAdapter(Number | None)


def _fault(details: Mapping[str, Any]) -> str:
    place = ", ".join(map(str, details["loc"])) or "it"
    return f"{place}: {details['msg'].lower()}, got {shown(details['input'])}"
