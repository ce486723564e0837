"""Readers of JSON values that name the place of what is wrong."""

import re
from collections.abc import Mapping
from typing import Any

from ringmaster.tasks.planning.problems.faults import shown

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
