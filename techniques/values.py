"""Immutable values and their JSON form.

Everything that travels between processes, into a ledger or onto disk is a frozen dataclass built of numbers, strings,
tuples, mappings and other such dataclasses. `to_json` and `from_json` convert them without a line of code per class.
"""

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, cast

T = TypeVar("T")

SINCE_LATER = {"since_later": True}
"""The metadata of a field that came after values without it were kept: it is left out of the JSON form while it has
its default, so that those values keep their form and their digest."""


def storable(text: str) -> str:
    """A text as every database and every HTTP client takes it: names of files may hold bytes that are no UTF-8."""
    return text.replace("\0", "").encode("utf-8", "replace").decode("utf-8")


def to_json(value: Any) -> Any:
    """The plain lists, dicts and scalars that say the same as `value`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value) if not _unsaid(f, value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{value!r} of type {type(value).__name__} has no JSON form")


def from_json(cls: type[T], data: Any) -> T:
    """The `cls` whose `to_json` is `data`. Raises ValueError on an unknown or missing field, or another shape."""
    return cast(T, _convert(cls, data))


def digest(value: Any, *, length: int = 16) -> str:
    """A hexadecimal name for what `value` says: equal values have equal digests in every process."""
    text = json.dumps(to_json(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def _unsaid(field: dataclasses.Field[Any], value: Any) -> bool:
    return "since_later" in field.metadata and bool(getattr(value, field.name) == field.default)


def _convert(hint: Any, data: Any) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass(hint, data)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        return _convert(next(a for a in arguments if a is not type(None)), data)
    if origin is tuple:
        if not isinstance(data, (list, tuple)):
            raise ValueError(f"a list is wanted, not {data!r:.100}")
        hints = [arguments[0]] * len(data) if len(arguments) == 2 and arguments[1] is ... else arguments
        return tuple(_convert(h, item) for h, item in zip(hints, data, strict=True))
    if origin is Mapping:
        if not isinstance(data, Mapping):
            raise ValueError(f"an object is wanted, not {data!r:.100}")
        return {key: _convert(arguments[1], item) for key, item in data.items()}
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    return data


def _dataclass(cls: type, data: Any) -> Any:
    if not isinstance(data, Mapping):
        raise ValueError(f"{cls.__name__}: an object is wanted, not {data!r:.100}")
    hints = typing.get_type_hints(cls)
    fields = {f.name for f in dataclasses.fields(cls)}
    if unknown := set(data) - fields:
        raise ValueError(f"{cls.__name__} has no field {sorted(unknown)}; it has {sorted(fields)}")
    try:
        return cls(**{name: _convert(hints[name], item) for name, item in data.items()})
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from error
