"""Sections of batch files for the optional parts of a job, built from the annotations of the parts' fields."""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache, reduce
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, create_model

from ringmaster.tasks.batch import references
from ringmaster.tasks.batch.references import MODULE_PATTERN, OneOf
from ringmaster.techniques.job_parts import (
    NAME_PATTERN,
    Choices,
    Description,
    Distinct,
    Format,
    JobPart,
    Limits,
    part_kinds,
)

FORMATS: Mapping[str, Any] = {
    "folder": AfterValidator(references.folder),
    "metric": AfterValidator(lambda name: references.metric(name.removeprefix("eval/"))),
    "parent": AfterValidator(references.parent),
    "module": StringConstraints(pattern=MODULE_PATTERN),
    "name": StringConstraints(pattern=NAME_PATTERN),
}
"""What Pydantic has for the names of formats."""


class Section(BaseModel):
    """Base of all sections of a batch file: unknown keys are refused, and types are not coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, title=None)


SECTIONS: dict[Any, type[Section]] = {}
"""The sections of dataclasses of which parts have fields; the schema has them."""


def part_keys() -> dict[str, Any]:
    """Returns the keys of a job that its optional parts have, as the fields of a Pydantic model."""
    result: dict[str, Any] = {}
    for kind in dict.fromkeys(part_kinds().values()):
        if not kind.key:
            result |= _fields(kind)
            continue
        result[kind.key] = (section_of(kind.key) | None, Field(default=None, description=kind.description))
    return result


@cache
def section_of(key: str) -> type[Section]:
    """Returns the section of the part that lies under a key."""
    kind = part_kinds()[key]
    name, title = kind.__name__.removesuffix("Settings").removesuffix("Spec"), (kind.__doc__ or "").partition("\n")[0]
    return create_model(f"{name}Section", __base__=Section, __doc__=title, **_fields(kind))


def _fields(kind: type[JobPart]) -> dict[str, Any]:
    """Returns the fields of a dataclass that are keys of files."""
    hints, result = get_type_hints(kind, include_extras=True), {}
    for each in dataclasses.fields(kind):  # type: ignore[arg-type]
        hint = hints[each.name]
        for item in getattr(hint, "__metadata__", ()):
            if isinstance(item, Description):
                default = ... if each.default is dataclasses.MISSING else _in_file(each.default)
                result[each.name] = (_type_of(hint), Field(default=default, description=item.text))
    return result


def _type_of(hint: Any) -> Any:
    """Returns the type of a value in a file for that of a field: lists for tuples, and checks for annotations."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        checks = (check for item in arguments[1:] for check in _checks(item))
        return reduce(lambda checked, check: Annotated[checked, check], checks, _type_of(arguments[0]))
    if origin in (Union, UnionType):
        return Union[tuple(map(_type_of, arguments))]  # noqa: UP007
    if origin is tuple:
        return list[_type_of(arguments[0])]  # type: ignore[misc]
    if origin is Mapping:
        return dict[tuple(map(_type_of, arguments))]  # type: ignore[misc]
    return SECTIONS.get(hint, hint)


def _checks(annotation: Any) -> Iterator[Any]:
    """Yields what Pydantic has for an annotation of a part; nothing for one that checks nothing."""
    match annotation:
        case Limits():
            yield Field(**{name: limit for name, limit in vars(annotation).items() if limit is not None})
        case Choices(names):
            yield OneOf(names)
        case Format(name):
            yield FORMATS[name]
        case Distinct(at_most=at_most):
            yield from (references.Distinct, Field(max_length=at_most))


def _in_file(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default
