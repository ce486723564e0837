"""The answer: which job runs where, when and under which option, with what proves how good that is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Segment:
    """One job on one gang under one option, from `start_s` to `end_s`.

    option: index into the job's options. work: share of the whole job that is done here.
    overhead_s: seconds of the segment that do no work (the switch cost of a job that goes on elsewhere).
    devices: ((node id, (device ids...)), ...), one entry a node.
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
        """Seconds that the gang is held."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Certificate:
    """Dual prices that prove a lower bound with nothing but arithmetic; the formulas are in `verify`.

    slot_prices: worth of a slot by its size in devices, per second. job_prices: worth of a job's own time,
        by job id.
    work_prices: worth of a job's whole work, by job id; where there are any, they are the proof, and the
        others are empty.
    cover_prices: worth of a job's whole work, by job id, where options carry several jobs; beside slot and job prices.
    typed_prices: slot prices by the type of the node's devices, where there are several types.
    """

    slot_prices: Mapping[int, float] = field(default_factory=dict)
    job_prices: Mapping[str, float] = field(default_factory=dict)
    work_prices: Mapping[str, float] = field(default_factory=dict)
    typed_prices: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    cover_prices: Mapping[str, float] = field(default_factory=dict)

    def prices_of(self, device_type: str) -> Mapping[int, float]:
        """Slot prices on nodes of a type."""
        return self.typed_prices.get(device_type, self.slot_prices)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Certificate":
        """The certificate that a JSON object holds."""
        return cls(
            {int(slot): float(price) for slot, price in data.get("slot_prices", {}).items()},
            {str(job): float(price) for job, price in data.get("job_prices", {}).items()},
            {str(job): float(price) for job, price in data.get("work_prices", {}).items()},
            {
                str(kind): {int(slot): float(price) for slot, price in prices.items()}
                for kind, prices in data.get("typed_prices", {}).items()
            },
            {str(job): float(price) for job, price in data.get("cover_prices", {}).items()},
        )

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads."""
        if self.work_prices:
            return {"work_prices": dict(self.work_prices)}
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
    """Segments in order of their start, and a bound that no plan of this kind can beat.

    lower_bound_s: seconds, or None where nothing was proved. certificate: prices that prove that bound to
        anyone, or None where it rests on a solver's own proof, which `proof` names.
    objective, value, value_bound: what was minimised other than the makespan, its value and what no plan beats.
    method: what found the plan. seconds: time spent by stage; two plans that differ only there are equal.
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

    @property
    def makespan_s(self) -> float:
        """When the last segment ends, in seconds from the start of the plan."""
        return max((segment.end_s for segment in self.segments), default=0.0)

    @property
    def gap(self) -> float | None:
        """How far the objective may be above the best possible, as a share of the bound; None without a bound."""
        if self.objective != "makespan":
            if self.value is None or not self.value_bound:
                return None
            return max(0.0, self.value / self.value_bound - 1.0)
        if not self.lower_bound_s:
            return None
        return max(0.0, self.makespan_s / self.lower_bound_s - 1.0)

    @property
    def num_switches(self) -> int:
        """How often a job stops and goes on under another option or on other devices."""
        return sum(self.num_switches_of(job) for job in {segment.job for segment in self.segments})

    def num_switches_of(self, job: str) -> int:
        """The switches of one job; a segment that continues the one before on the same gang is none."""
        mine = self.segments_of(job)
        return sum(
            a.option != b.option or set(a.devices) != set(b.devices) or b.start_s - a.end_s > 1e-6 * b.end_s
            for a, b in pairwise(mine)
        )

    def segments_of(self, job: str) -> tuple[Segment, ...]:
        """A job's segments in order of their start."""
        return tuple(sorted((s for s in self.segments if s.job == job), key=lambda s: (s.start_s, s.end_s)))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """The plan that a JSON object holds. Raises ValueError naming what is missing or of the wrong
        type."""
        try:
            segments = tuple(
                Segment(
                    job=row["job"],
                    option=row["option"],
                    start_s=float(row["start"]),
                    end_s=float(row["end"]),
                    work=float(row["work"]),
                    overhead_s=float(row.get("overhead", 0.0)),
                    devices=tuple((node, tuple(ids)) for node, ids in row["gpus"]),
                )
                for row in data["segments"]
            )
            bound = data.get("lower_bound")
            certificate = data.get("certificate") or data.get("extended_certificate")
            return cls(
                problem_name=data["instance"],
                segments=segments,
                lower_bound_s=None if bound is None else float(bound),
                certificate=Certificate.from_json(certificate) if certificate else None,
                proof=data.get("proof", ""),
                method=data.get("method", ""),
                seconds=data.get("seconds", {}),
                objective=data.get("objective", "makespan"),
                value=data.get("value"),
                value_bound=data.get("value_bound"),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a plan: {type(error).__name__} {error}") from error

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads."""
        proved = self.certificate.to_json() if self.certificate else None
        is_plain = proved is not None and proved.keys() == {"slot_prices", "job_prices"}
        return {
            "instance": self.problem_name,
            "makespan": self.makespan_s,
            "lower_bound": self.lower_bound_s,
            # The file's "certificate" is one of slot and job prices; what proves the bound otherwise has its
            # own key.
            "certificate": proved if is_plain else None,
            **({"extended_certificate": proved} if proved and not is_plain else {}),
            "proof": self.proof,
            "method": self.method,
            "seconds": dict(self.seconds),
            "objective": self.objective,
            "value": self.value,
            "value_bound": self.value_bound,
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
