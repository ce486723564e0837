"""Sections of batch files for the keys of optional features, built from the annotations of the parts' fields."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
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
    FileKeys,
    Format,
    KeysOf,
    Limits,
    part_kinds,
)

FORMATS: Mapping[str, Any] = {
    "files": AfterValidator(references.files),
    "folder": AfterValidator(references.folder),
    "metric": AfterValidator(lambda name: references.metric(name.removeprefix("eval/"))),
    "parent": AfterValidator(references.parent),
    "module": StringConstraints(pattern=MODULE_PATTERN),
    "name": StringConstraints(pattern=NAME_PATTERN),
    "text": StringConstraints(min_length=1),
}
"""What Pydantic has for the names of formats."""


class Section(BaseModel):
    """Base of all sections of a batch file: unknown keys are refused, and types are not coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, title=None)


SECTIONS: dict[Any, type[Section]] = {}
"""The sections of dataclasses: of those that the schema has, of which parts have fields, and those built here."""


def keys_of(kinds: Iterable[type[FileKeys]]) -> dict[str, Any]:
    """Returns keys of features as the fields of a Pydantic model."""
    result: dict[str, Any] = {}
    for kind in kinds:
        if not kind.key:
            result |= _fields(kind)
            continue
        result[kind.key] = (section_of(kind) | None, Field(default=None, description=kind.description))
    return result


def section_of(kind: type[FileKeys]) -> type[Section]:
    """Returns the section with the fields of a dataclass."""
    name, title = kind.__name__.removesuffix("Settings").removesuffix("Spec"), (kind.__doc__ or "").partition("\n")[0]
    if kind not in SECTIONS:
        SECTIONS[kind] = create_model(f"{name}Section", __base__=Section, __doc__=title, **_fields(kind))
    return SECTIONS[kind]


def _fields(kind: type[FileKeys]) -> dict[str, Any]:
    """Returns the fields of a dataclass that are keys of files."""
    hints, result = get_type_hints(kind, include_extras=True), {}
    for each in dataclasses.fields(kind):  # type: ignore[arg-type]
        hint = hints[each.name]
        for item in getattr(hint, "__metadata__", ()):
            if isinstance(item, Description):
                default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
                default = ... if default is dataclasses.MISSING else _in_file(default)
                result[each.name] = (_type_of(hint), Field(default=default, description=item.text))
    return result


def _type_of(hint: Any) -> Any:
    """Returns the type of a value in a file for that of a field: lists for tuples, and checks for annotations."""
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and issubclass(hint, FileKeys):
        return section_of(hint)
    if origin is Annotated and isinstance(arguments[1], KeysOf):
        return section_of(part_kinds()[arguments[1].key])
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
