"""Plans: which job runs where, when and under which option, with a lower bound and its certificate."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ringmaster.tasks.planning.problems.faults import shown

LARGEST = 10**18
"""Limit of the integers in a plan."""


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
    """

    slot_prices: Mapping[int, float] = field(default_factory=dict)
    job_prices: Mapping[str, float] = field(default_factory=dict)
    work_prices: Mapping[str, float] = field(default_factory=dict)
    typed_prices: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    cover_prices: Mapping[str, float] = field(default_factory=dict)

    def prices_of(self, device_type: str) -> Mapping[int, float]:
        """Slot prices on nodes of a device type."""
        return self.typed_prices.get(device_type, self.slot_prices)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Certificate":
        """Reads a certificate from a JSON object. Raises ValueError where the object is not a certificate."""
        said = _object(data, "certificate")
        slots, typed = said.get("slot_prices", {}), _object(said.get("typed_prices", {}), "typed_prices")
        jobs = {key: _prices(said.get(key, {}), key) for key in ("job_prices", "work_prices", "cover_prices")}
        return cls(
            slot_prices=_slot_prices(slots, "slot_prices"),
            typed_prices={kind: _slot_prices(prices, f"typed_prices of {kind!r}") for kind, prices in typed.items()},
            **jobs,
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
    """Segments in the order of their starts, and a lower bound for plans of this kind.

    lower_bound_s: seconds; None where no bound was proved.
    certificate: prices that prove that bound by arithmetic; None where the bound rests on a proof of another kind, such
        as a solver's, which `proof` names.
    proof: the name of the proof.
    method: the name of the method that found the plan.
    seconds: planning time by stage; two plans that differ only here are equal.
    objective, value, value_bound: the objective where it is not the makespan, its value, and a bound on its value.
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
        """End of the last segment, in seconds from the start of the plan."""
        return max((segment.end_s for segment in self.segments), default=0.0)

    @property
    def gap(self) -> float | None:
        """How far the objective may be above the best possible, as a share of the bound; None without a bound."""
        value, bound = self.value, self.value_bound
        if value is None:
            value, bound = self.makespan_s, self.lower_bound_s
        return max(0.0, value / bound - 1.0) if bound else None

    @property
    def num_switches(self) -> int:
        """How often jobs stop and continue under another option or on other devices."""
        return sum(self.num_switches_of(job) for job in {segment.job for segment in self.segments})

    def num_switches_of(self, job: str) -> int:
        """Counts the switches of one job.

        A segment that continues the previous one without a pause, under its option and on its devices, is no switch.
        """
        mine = self.segments_of(job)
        return sum(
            a.option != b.option or set(a.devices) != set(b.devices) or b.start_s - a.end_s > 1e-6 * b.end_s
            for a, b in pairwise(mine)
        )

    def segments_of(self, job: str) -> tuple[Segment, ...]:
        """Returns a job's segments in the order of their starts."""
        return tuple(sorted((s for s in self.segments if s.job == job), key=lambda s: (s.start_s, s.end_s)))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """Reads a plan from a JSON object. Raises ValueError that names what is missing or of the wrong type."""
        try:
            return _plan(_object(data, "it"))
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
    return Plan(
        problem_name=_text(data.get("instance"), "instance"),
        segments=tuple(_segment(row, f"segment {i}") for i, row in enumerate(_list(data.get("segments"), "segments"))),
        lower_bound_s=_number_or_none(data.get("lower_bound"), "lower_bound"),
        certificate=Certificate.from_json(certificate) if certificate else None,
        proof=_text(data.get("proof", ""), "proof"),
        method=_text(data.get("method", ""), "method"),
        seconds=_prices(data.get("seconds", {}), "seconds"),
        objective=_text(data.get("objective", "makespan"), "objective"),
        value=_number_or_none(data.get("value"), "value"),
        value_bound=_number_or_none(data.get("value_bound"), "value_bound"),
    )


def _segment(data: Any, place: str) -> Segment:
    row = _object(data, place)
    devices = []
    for item in _list(row.get("gpus"), f"{place}, gpus"):
        node, ids = item if isinstance(item, list) and len(item) == 2 else (None, None)
        ids = [_index(device, f"{place}, gpus") for device in _list(ids, f"{place}, gpus")]
        devices.append((_text(node, f"{place}, gpus"), tuple(ids)))
    return Segment(
        job=_text(row.get("job"), f"{place}, job"),
        option=_index(row.get("option"), f"{place}, option"),
        start_s=_number(row.get("start"), f"{place}, start"),
        end_s=_number(row.get("end"), f"{place}, end"),
        work=_number(row.get("work"), f"{place}, work"),
        overhead_s=_number(row.get("overhead", 0.0), f"{place}, overhead"),
        devices=tuple(devices),
    )


def _slot_prices(data: Any, place: str) -> dict[int, float]:
    prices = _prices(data, place)
    if wrong := [slot for slot in prices if not re.fullmatch("[1-9][0-9]{0,8}", slot)]:
        raise ValueError(f"{place} must be by numbers of devices, not by {shown(wrong[0])}")
    return {int(slot): price for slot, price in prices.items()}


def _prices(data: Any, place: str) -> dict[str, float]:
    return {name: _number(price, f"{place}, {shown(name)}") for name, price in _object(data, place).items()}


def _object(data: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError(f"{place} must be an object, not {shown(data)}")
    return data


def _list(data: Any, place: str) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError(f"{place} must be a list, not {shown(data)}")
    return data


def _text(data: Any, place: str) -> str:
    if not isinstance(data, str):
        raise ValueError(f"{place} must be text, not {shown(data)}")
    return data


def _index(data: Any, place: str) -> int:
    if not isinstance(data, int) or isinstance(data, bool) or not 0 <= data <= LARGEST:
        raise ValueError(f"{place} must be a whole number from 0 on, not {shown(data)}")
    return data


def _number(data: Any, place: str) -> float:
    """Reads a number; NaN and infinity pass, since `verify` reports them."""
    if not isinstance(data, (int, float)) or isinstance(data, bool) or (isinstance(data, int) and abs(data) > LARGEST):
        raise ValueError(f"{place} must be a number, not {shown(data)}")
    return float(data)


def _number_or_none(data: Any, place: str) -> float | None:
    return None if data is None else _number(data, place)
