"""The keys of a batch that say what its devices cost and emit, when, and how much that may be."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from ringmaster.techniques.job_features import Choices, Description, FileKeys, Limits, Positive

SERIES = "a number, a CSV file with the columns time,value, or a list of 24, the hours of the day"
MAX_LIMIT = 1e9  # sums over the batches of a pool are within a planner's limits
NEGATIVE = ("refuse", "as-zero")

Values = float | str | tuple[float, ...]
"""A value over time, as a file gives it."""


@dataclass(frozen=True, kw_only=True)
class DeviceTariff:
    """What devices cost and emit."""

    price: Annotated[Values | None, Description(f"the price of a device-hour: {SERIES}")] = None
    energy_price: Annotated[Values | None, Description(f"the price of a kWh, beside that of devices: {SERIES}")] = None
    carbon: Annotated[Values | None, Description(f"grams of CO2e of a kWh: {SERIES}")] = None
    power_w: Annotated[
        Positive | None,
        Description("the watts of a device while a job holds it, such as 300; default: its limit, or a usual value"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class NodeTariff(DeviceTariff):
    """What the devices of one node cost and emit; what is left out is that of all nodes."""

    until: Annotated[
        str | None, Description("when the node goes away, as a spot price ends, such as 2026-01-31T14:00+01:00")
    ] = None


@dataclass(frozen=True, kw_only=True)
class SpendingLimits:
    """The most that a batch may spend and emit."""

    money: Annotated[
        float | None, Limits(ge=0, le=MAX_LIMIT), Description("in the currency of the prices, such as 20")
    ] = None
    carbon_kg: Annotated[float | None, Limits(ge=0, le=MAX_LIMIT), Description("kilograms of CO2e, such as 1.5")] = None


@dataclass(frozen=True, kw_only=True)
class TradeOff:
    """What `objective: trade-off` adds up; what is left out counts nothing."""

    hour: Annotated[
        float, Limits(ge=0, le=MAX_LIMIT), Description("the worth of an hour by which the last job ends later")
    ] = 0.0
    money: Annotated[float, Limits(ge=0, le=MAX_LIMIT), Description("the worth of a unit of money, such as 1")] = 0.0
    carbon_kg: Annotated[
        float, Limits(ge=0, le=MAX_LIMIT), Description("the worth of a kilogram of CO2e, such as 0.1")
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class TimedTariff(DeviceTariff):
    """What devices cost and emit, by the time of the day: the keys of a file for a whole pool."""

    time_zone: Annotated[
        str | None, Description("the zone of hours, and of times that name none, such as Europe/Berlin")
    ] = None
    negative_prices: Annotated[
        str, Choices(NEGATIVE), Description("refuse, or as-zero, which counts a negative price as 0")
    ] = "refuse"
    tariffs: Annotated[
        Mapping[str, NodeTariff], Description("by node, where they differ, such as {n1: {price: 0.4, power_w: 250}}")
    ] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TariffKeys(TimedTariff, FileKeys):
    """What devices cost and emit, by the time of the day."""

    at_most: Annotated[
        SpendingLimits | None, Description("bounds of the whole batch, such as {money: 20, carbon_kg: 1.5}")
    ] = None
    trade_off: Annotated[TradeOff | None, Description("for `objective: trade-off`, such as {hour: 2, money: 1}")] = None


BATCH_KEYS = (TariffKeys,)
