"""Plans: which job runs where, when and under which option, with a lower bound and its certificate."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from ringmaster.tasks.planning.plans.window_prices import (
    CompletionPrices,
    WindowPrices,
    index_at,
    list_at,
    number_at,
    number_or_none_at,
    object_at,
    prices_at,
    slot_prices_at,
    text_at,
    typed_prices_at,
)


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
    """Dual prices that prove a lower bound by arithmetic alone; `bounds.certificates` has the formulas.

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
