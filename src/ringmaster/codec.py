"""Immutable values and their JSON form.

Everything that is sent between processes or written into a ledger or onto disk is a frozen dataclass of numbers,
strings, tuples, mappings and other such dataclasses. `to_json` and `from_json` convert them without code per class.
The JSON form of a class with `OMITS_DEFAULTS` omits all fields that have their defaults.
"""

import dataclasses
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar, cast

T = TypeVar("T")

SINCE_LATER = {"since_later": True}
"""The metadata of a field that was added after values without it had been stored. The JSON form omits the field while
it has its default, so that the form and the digest of stored values do not change."""


BESIDE = ("flat", "features")
"""The keys in the metadata of fields whose items are stored among the other fields in the JSON form."""


def stored_as(key: str, *, default: Any = dataclasses.MISSING) -> Any:
    """Returns a dataclass field whose key in the JSON form differs from its name.

    The key keeps values readable that were stored before the field was renamed.
    """
    return dataclasses.field(default=default, metadata={"key": key})


def stored_flat(always: Mapping[str, Any]) -> Any:
    """Returns a dataclass field of a mapping whose items are stored among the other fields in the JSON form.

    Items that are null or empty lists are left out when they are read.

    always: items that the JSON form always has, and that the mapping has only with another value.
    """
    return dataclasses.field(default_factory=dict, metadata={"flat": always})


def stored_features(kind_of: Callable[[str], Any]) -> Any:
    """Returns a dataclass field of a tuple of features, dataclasses whose JSON forms are stored among the other fields.

    A feature lies under the `key` of its class. Where that is empty, its own fields do, but those with their defaults.

    kind_of: returns the class of the feature that has a key in the JSON form; None for other keys.
    """
    return dataclasses.field(default=(), metadata={"features": kind_of})


def feature_items(feature: Any) -> dict[str, Any]:
    """Returns the keys of a feature in the JSON form, and what they have."""
    if feature.key:
        return {feature.key: feature}
    values = ((each, getattr(feature, each.name)) for each in dataclasses.fields(feature))
    return {each.name: value for each, value in values if not _has_default(each, value)}


def to_json(value: Any) -> Any:
    """Returns `value` as plain lists, dicts and scalars. Raises ValueError on a type without a JSON form."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = (f for f in dataclasses.fields(value) if not _unsaid(f, value))
        return {key: to_json(item) for f in given for key, item in _items(f, getattr(value, f.name))}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{value!r} of type {type(value).__name__} has no JSON form")


def from_json(cls: type[T], data: Any) -> T:
    """Returns the `cls` whose `to_json` is `data`. Raises ValueError on unknown or missing fields or a wrong shape."""
    return cast(T, _converter(cls)(data))


def digest(value: Any, *, length: int = 16) -> str:
    """Returns a hexadecimal digest of `value`'s content; equal values have equal digests in every process."""
    text = json.dumps(to_json(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def set_fields(value: Any, *, but: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
    """Returns the JSON form of a dataclass without the fields that have their defaults.

    A key made of it counts every field, whatever is added to the class later, and stays the same when a field is added.

    but: dotted names of fields to leave out, such as "data.path".
    """
    result: dict[str, Any] = {}
    for each in dataclasses.fields(value):
        name, item = f"{prefix}{each.name}", getattr(value, each.name)
        if name in but or _has_default(each, item):
            continue
        if "features" in each.metadata:
            for feature in item:
                if feature.key and f"{prefix}{feature.key}" not in but:
                    result[feature.key] = set_fields(feature, but=but, prefix=f"{prefix}{feature.key}.")
                elif not feature.key:
                    result |= set_fields(feature, but=but, prefix=prefix)
        elif "flat" in each.metadata:
            result |= {key: to_json(own) for key, own in item.items() if f"{prefix}{key}" not in but}
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            nested = set_fields(item, but=but, prefix=f"{name}.")
            if nested or each.default is None:  # an adapter with default settings is not no adapter
                result[each.name] = nested
        else:
            result[each.name] = to_json(item)
    return result


def _unsaid(field: dataclasses.Field[Any], value: Any) -> bool:
    can_be = "since_later" in field.metadata or getattr(value, "OMITS_DEFAULTS", False)
    return can_be and _has_default(field, getattr(value, field.name))


def _has_default(field: dataclasses.Field[Any], item: Any) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(item == field.default_factory())
    return bool(item == field.default)


def _items(field: dataclasses.Field[Any], item: Any) -> Iterable[tuple[str, Any]]:
    """The keys of a field in the JSON form, and what they have."""
    if "features" in field.metadata:
        return (pair for feature in item for pair in feature_items(feature).items())
    return {**field.metadata["flat"], **item}.items() if "flat" in field.metadata else ((_key(field), item),)


def _key(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata.get("key", field.name))


def _converter(hint: Any) -> Callable[[Any], Any]:
    """Returns the function that makes a value of a type from its JSON form."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return functools.partial(_dataclass, hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        convert = _converter(next(a for a in arguments if a is not type(None)))
        return functools.partial(_optional, convert) if type(None) in arguments else convert
    if origin is tuple:
        is_of_any_length = len(arguments) == 2 and arguments[1] is ...
        each = (_converter(arguments[0]),) if is_of_any_length else tuple(_converter(a) for a in arguments)
        return functools.partial(_tuple, each, is_of_any_length)
    if origin is Mapping:
        return functools.partial(_mapping, _converter(arguments[1]))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint
    return _float if hint is float else _unchanged


def _optional(convert: Callable[[Any], Any], data: Any) -> Any:
    return None if data is None else convert(data)


def _tuple(converters: Sequence[Callable[[Any], Any]], is_of_any_length: bool, data: Any) -> Any:
    if not isinstance(data, (list, tuple)):
        raise ValueError(f"a list is wanted, not {data!r:.100}")
    if is_of_any_length:
        return tuple(map(converters[0], data))
    return tuple(convert(item) for convert, item in zip(converters, data, strict=True))


def _mapping(convert: Callable[[Any], Any], data: Any) -> Any:
    if not isinstance(data, Mapping):
        raise ValueError(f"an object is wanted, not {data!r:.100}")
    return {key: convert(item) for key, item in data.items()}


def _float(data: Any) -> Any:
    return float(data) if isinstance(data, int) and not isinstance(data, bool) else data


def finite(value: Any) -> Any:
    """Returns plain values with None for infinite floats and NaN, as JSON has neither: a metric of no rows is NaN."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _unchanged(data: Any) -> Any:
    return data


@functools.cache
def _fields(cls: type) -> Mapping[str, tuple[str, Callable[[Any], Any]]]:
    """Returns the name and the converter of each field of a class, by the field's key in JSON.

    Reading the types takes longer than the conversion itself, and a pool converts hundreds of events a second.
    """
    hints = typing.get_type_hints(cls)
    single = (f for f in dataclasses.fields(cls) if f.metadata.keys().isdisjoint(BESIDE))
    return {_key(f): (f.name, _converter(hints[f.name])) for f in single}


@functools.cache
def _field_with(cls: type, key: str) -> dataclasses.Field[Any] | None:
    """The field of a class that has a key in its metadata."""
    return next((f for f in dataclasses.fields(cls) if key in f.metadata), None)


def _take_features(field: dataclasses.Field[Any], data: Mapping[str, Any], unknown: set[str]) -> tuple[Any, ...]:
    """Returns the features in the JSON form of a class, and removes their keys from the unknown ones."""
    values: dict[Any, dict[str, Any]] = {}
    for key in sorted(unknown):
        if (kind := field.metadata["features"](key)) is not None:
            unknown.remove(key)
            if data[key] is not None:
                values.setdefault(kind, {})[key] = data[key]
    return tuple(_dataclass(kind, given[kind.key] if kind.key else given) for kind, given in values.items())


def _dataclass(cls: type, data: Any) -> Any:
    if not isinstance(data, Mapping):
        raise ValueError(f"{cls.__name__}: an object is wanted, not {data!r:.100}")
    fields, flat, features = _fields(cls), _field_with(cls, "flat"), _field_with(cls, "features")
    result: dict[str, Any] = {}
    unknown = set(data) - fields.keys()
    if unknown and features is not None:
        result[features.name] = _take_features(features, data, unknown)
    if unknown:
        if flat is None:
            known = sorted(name for name, _ in fields.values())
            raise ValueError(f"{cls.__name__} has no field {sorted(unknown)}; it has {known}")
        given = {key: tuple(item) if isinstance(item := data[key], list) else item for key in data if key in unknown}
        omitted = flat.metadata["flat"]
        result[flat.name] = {k: item for k, item in given.items() if item not in (None, ()) and item != omitted.get(k)}
    for key, item in data.items():
        if key in fields:
            name, convert = fields[key]
            result[name] = convert(item)
    try:
        return cls(**result)
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from error
