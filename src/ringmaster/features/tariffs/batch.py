"""The keys of batch files that say what devices cost and emit: their series are read, and their faults found."""

import math
import time
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from ringmaster.codec import to_json
from ringmaster.features.tariffs.series import (
    EXAMPLE,
    HOUR_S,
    HOURS,
    MAX_VALUE,
    Series,
    counted,
    is_zone,
    read_series,
    shown_time,
    time_of,
)
from ringmaster.features.tariffs.terms import G_PER_KG, SERIES_KEYS, Tariff, Tariffs
from ringmaster.files import is_file, path_in
from ringmaster.findings import Finding, Location, Raw, as_mapping, findings_where
from ringmaster.tasks.batch.file_hooks import BatchFileHook
from ringmaster.tasks.batch.sections import Section
from ringmaster.text import is_printable_name, join_limited

PAID, EMITTED, TRADED = "cost", "emissions", "trade-off"
"""The objectives that depend on tariffs."""


class TariffsInFiles(BatchFileHook):
    """The tariffs of a batch."""

    def file_findings(self, batch: Raw, *, folder: Path) -> Iterator[Finding]:
        """Yields what is wrong with series, each fault of a file with its line, and between the keys."""
        zone = batch.get("time_zone")
        if isinstance(zone, str) and not is_zone(zone):
            yield Finding(("time_zone",), f"{zone!r} is not a time zone", "give a name such as Europe/Berlin")
        reader = SeriesReader(batch, folder=folder)
        for place, value in _placed_series(batch):
            _, faults = reader.read(place, value)
            yield from faults
        for node in as_mapping(batch.get("tariffs")):
            if not is_printable_name(str(node)):
                yield Finding(("tariffs", node), "is not a name that a node can have", "give the name of a node")
        yield from _until_findings(batch, reader)
        yield from _rules(batch)

    def planning_features(self, batch: Section, *, folder: Path) -> Mapping[str, Any]:
        """Returns the tariffs, with the values of their files."""
        raw = batch.model_dump(exclude_none=True)
        keys = (*SERIES_KEYS, "power_w", "at_most", "trade_off", "tariffs")
        # A price of 0 is one. That a batch is to emit little is a reason to look for what says how much it emits.
        if raw.get("objective") != EMITTED and not any(raw.get(key) not in (None, {}) for key in keys):
            return {}
        reader, limits, worth = SeriesReader(raw, folder=folder), raw.get("at_most", {}), raw.get("trade_off", {})
        kilograms = limits.get("carbon_kg")
        return {
            Tariffs.key: to_json(
                Tariffs(
                    every=reader.tariff((), raw),
                    nodes={node: reader.tariff(("tariffs", node), each) for node, each in raw["tariffs"].items()},
                    max_money=limits.get("money"),
                    max_emissions_g=None if kilograms is None else kilograms * G_PER_KG,
                    factors=worth
                    and {
                        "end": worth["hour"] / HOUR_S,
                        "cost": worth["money"],
                        "emissions": worth["carbon_kg"] / G_PER_KG,
                    },
                )
            )
        }


class SeriesReader:
    """Reads the values of a batch's keys. Each file is read once.

    batch: its plain values. folder: in which files lie.
    """

    def __init__(self, batch: Raw, *, folder: Path) -> None:
        zone, self._folder = batch.get("time_zone"), folder
        # A wrong one is a fault of its own: all others are looked for as if it were right.
        is_wrong = zone is not None and not (isinstance(zone, str) and is_zone(zone))
        self._zone = "UTC" if is_wrong else zone or ""
        self._is_zero = batch.get("negative_prices") == "as-zero"
        self._read_file = cache(partial(read_series, zone=self._zone))

    def tariff(self, place: Location, raw: Raw) -> Tariff:
        """Returns the tariff of plain values in which no fault was found."""
        series = {key: self.read((*place, key), raw[key])[0] for key in SERIES_KEYS if raw.get(key) is not None}
        until_s = self.moment(str(raw["until"])) if raw.get("until") else None
        return Tariff(**series, power_w=raw.get("power_w"), until_s=until_s)

    def read(self, place: Location, value: Any) -> tuple[Series | None, list[Finding]]:
        """Returns a series, and its faults. The schema finds values of other types."""
        allows_negative = self._is_zero and place[-1] != "carbon"
        if isinstance(value, str):
            return self._of_file(place, value, allows_negative=allows_negative)
        given = value if isinstance(value, (list, tuple)) else [value]
        if not all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in given):
            return None, []
        numbers = [_as_float(each) for each in given]
        hours = "give the values of the hours 0 to 23"
        faults = [
            *findings_where(
                (
                    isinstance(value, (list, tuple)) and len(numbers) != HOURS,
                    place,
                    f"has {len(numbers)} of {HOURS} values",
                    hours,
                )
            ),
            *(
                Finding(
                    (*place, k) if len(numbers) > 1 else place, f"is {each}", f"give a number from 0 to {MAX_VALUE:g}"
                )
                for k, each in enumerate(numbers)
                if not math.isfinite(each) or each > MAX_VALUE or (each < 0 and not allows_negative)
            ),
        ]
        if len(numbers) == HOURS and not self._zone:
            faults.append(Finding(place, "has the hours of a day in no zone", "give time_zone, such as Europe/Berlin"))
        if faults:
            return None, faults
        values = tuple(map(counted, numbers))
        return Series(values=values, zone=self._zone if len(values) > 1 else ""), []

    def moment(self, text: str) -> float:
        """Returns a moment in seconds since the epoch. Raises ValueError where a text is none."""
        return time_of(text.strip(), zone=self._zone)[0]

    def _of_file(self, place: Location, name: str, *, allows_negative: bool) -> tuple[Series | None, list[Finding]]:
        if not is_file(self._folder, name):
            remedy = f"put it into {self._folder}, or give its path; a number has neither quotes nor a unit"
            return None, [Finding(place, f"there is no file {name!r}", remedy)]
        try:
            read = self._read_file(path_in(self._folder, name), allows_negative=allows_negative)
        except (OSError, ValueError) as error:
            return None, [Finding(place, f"{name} cannot be read: {error}", "give a CSV file in UTF-8")]
        remedy = "give time,value in ascending order, at equal distances, with a zone"
        if place[-1] != "carbon" and any("is negative" in fault for fault in read.faults):
            remedy += ", or negative_prices: as-zero"
        lines = join_limited(read.faults, between="; ")  # one fault, as a place in a file has one
        faults = [Finding(place, f"{name}, {lines}", remedy)] if lines else []
        if read.series is not None and not read.series.times_s[0] <= time.time() < read.series.ends_s:
            first, last = (shown_time(at_s) for at_s in (read.series.times_s[0], read.series.ends_s))
            what = f"{name} has values from {first} to {last}, and none of now"
            faults.append(Finding(place, what, "give values from now on"))
        return read.series, faults


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # a whole number of hundreds of digits
        return math.copysign(math.inf, number)


def _sections(batch: Raw) -> Iterator[tuple[Location, Raw]]:
    yield (), batch
    for node, each in as_mapping(batch.get("tariffs")).items():
        yield ("tariffs", node), as_mapping(each)


def _placed_series(batch: Raw) -> Iterator[tuple[Location, Any]]:
    for place, section in _sections(batch):
        for key in SERIES_KEYS:
            if section.get(key) is not None:
                yield (*place, key), section[key]


def _until_findings(batch: Raw, reader: SeriesReader) -> Iterator[Finding]:
    for place, section in _sections(batch):
        if isinstance(text := section.get("until"), str):
            try:
                is_over = reader.moment(text) <= time.time()
            except ValueError as error:
                yield Finding((*place, "until"), str(error), f"give a moment with its zone, such as {EXAMPLE}")
            else:
                if is_over:
                    yield Finding((*place, "until"), f"{text} is over", "leave the node out, or give a later moment")


def _rules(batch: Raw) -> Iterator[Finding]:
    """Yields the faults between keys, whatever the pool has a tariff for (`Tariffs.findings`)."""
    objective, limits, worth = batch.get("objective"), as_mapping(batch.get("at_most")), batch.get("trade_off")
    sections = [section for _, section in _sections(batch)]
    is_paid = any(section.get(key) is not None for section in sections for key in ("price", "energy_price"))
    depends = (PAID, EMITTED, TRADED)
    yield from findings_where(
        (
            is_paid and batch.get("price_per_device_hour") not in (None, 1.0),
            ("price_per_device_hour",),
            "is given beside other prices",
            "give `price` alone, a number too",
        ),
        (
            (objective == TRADED) != isinstance(worth, Mapping),
            ("trade_off",) if worth is not None else ("objective",),
            "says what objective: trade-off adds up, and belongs to it alone",
            "give both, or none",
        ),
        (
            isinstance(worth, Mapping) and not any(worth.values()),
            ("trade_off",),
            "counts nothing",
            "give a worth of hour, money or carbon_kg",
        ),
        (
            limits and objective not in depends,
            ("at_most",),
            f"is kept under the objectives {', '.join(depends)} alone",
            "give one of them; for the last end, trade-off with trade_off: {hour: 1}",
        ),
    )


BATCH_FILE_HOOKS = (TariffsInFiles(),)
