"""Sections of batch files, built from the annotations of the fields of a job, of its values, and of features."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, reduce
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema, create_model

from ringmaster.codec import from_json
from ringmaster.tasks.batch import references
from ringmaster.tasks.batch.references import OneOf
from ringmaster.techniques.data import SOURCES
from ringmaster.techniques.job_features import (
    MAX_WHOLE,
    Choices,
    Description,
    Distinct,
    FileKeys,
    Format,
    KeysOf,
    Limits,
    feature_kinds,
)
from ringmaster.techniques.job_specs import Adapter
from ringmaster.techniques.loss import loss_names


class Section(BaseModel):
    """Base of all sections of a batch file: unknown keys are refused, and types are not coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, title=None)


def _agreeing(adapter: Section) -> Section:
    """Checks that an adapter's settings agree with those of the folder that it continues from."""
    references.agreeing(from_json(Adapter, adapter.model_dump()))
    return adapter


LOSSES = (
    f"one of {', '.join(loss_names())}, also with options, such as {{name: cross-entropy, label_smoothing: 0.1}}; or "
    '"package.module:function", which returns (sum, count), such as my_losses:focal'
)
TYPES: dict[str, Any] = {
    "adapter": AfterValidator(references.adapter),
    "adopt": references.Adopt,
    "agreeing": AfterValidator(_agreeing),
    "architecture": AfterValidator(references.architecture),
    "command": references.Command,
    "data_kind": references.DataKind,
    "evaluation_metric": references.EvaluationMetric,
    "factory": AfterValidator(references.factory),
    "files": AfterValidator(references.files),
    "folder": AfterValidator(references.folder),
    "freeze_pattern": StringConstraints(pattern=r"^!?[^!\s]\S*$"),
    "loss": Annotated[references.Loss, Description(LOSSES)],
    "metric": AfterValidator(lambda name: references.metric(name.removeprefix("eval/"))),
    "module": StringConstraints(pattern=references.MODULE_PATTERN),
    "name": references.Name,
    "parent": AfterValidator(references.parent),
    "pattern": StringConstraints(pattern=r"^[^!\s]\S*$"),
    "pretrained": AfterValidator(references.pretrained),
    "rows": references.FileFormat,
    "source": OneOf(tuple(SOURCES)),
    # The minimum depends on the adaptation: see `rules`.
    "steps": Annotated[int, Field(le=MAX_WHOLE), WithJsonSchema({"type": "integer", "minimum": 0})],
    "store": AfterValidator(references.store),
    "technique": references.Technique,
    "text": StringConstraints(min_length=1),
    "version": int | str,
}
"""What Pydantic has for the names of formats: a type of its own, or a check of the field's. The schema has those of
sections."""


def keys_of(kinds: Iterable[type[FileKeys]]) -> dict[str, Any]:
    """Returns keys of features as the fields of a Pydantic model."""
    result: dict[str, Any] = {}
    for kind in kinds:
        if not kind.key:
            result |= fields_of(kind)
            continue
        section = section_of(kind)  # type: ignore[arg-type]
        result[kind.key] = (section | None, Field(default=None, description=kind.description))
    return result


@cache
def section_of(kind: Any) -> type[Section]:
    """Returns the section for a dataclass."""
    name, title = kind.__name__.removesuffix("Settings").removesuffix("Spec"), (kind.__doc__ or "").partition("\n")[0]
    return create_model(f"{name}Section", __base__=Section, __doc__=title, **fields_of(kind))


def fields_of(kind: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that are keys of files, as the fields of a Pydantic model."""
    hints, result = get_type_hints(kind, include_extras=True), {}
    for each in dataclasses.fields(kind):
        about = list(_about(hints[each.name]))
        if about:
            texts = (item.text for item in about if isinstance(item, Description))
            names = (item.names for item in about if isinstance(item, (Choices, OneOf)))
            text = next(texts, "") or f"one of {', '.join(next(names))}"
            result[each.name] = (_type_of(hints[each.name]), Field(**_default(each), description=text))
    return result


def _about(hint: Any) -> Iterator[Any]:
    """Yields what is said of the values of a field itself, also by the type that a format represents."""
    for item in getattr(hint, "__metadata__", ()):
        yield item
        if isinstance(item, Format):
            yield from getattr(TYPES[item.name], "__metadata__", ())


def _default(field: "dataclasses.Field[Any]") -> dict[str, Any]:
    """Returns the default of a field of a dataclass as an argument of `Field`; none where the key is needed."""
    factory: Any = field.default_factory
    if dataclasses.is_dataclass(factory):
        return {"default_factory": section_of(factory)}  # type: ignore[arg-type]
    if factory is not dataclasses.MISSING:
        return {"default": factory()}
    if field.default is dataclasses.MISSING:
        return {}
    return {"default": list(field.default) if isinstance(field.default, tuple) else field.default}


def _type_of(hint: Any) -> Any:
    """Returns the type of a value in a file for that of a field: lists for tuples, and checks for annotations."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _checked(arguments[0], arguments[1:])
    if origin in (Union, UnionType):
        return Union[tuple(map(_type_of, arguments))]  # noqa: UP007
    if origin is tuple:
        return list[_type_of(arguments[0])]  # type: ignore[misc]
    if origin is Mapping:
        return dict[tuple(map(_type_of, arguments))]  # type: ignore[misc]
    return section_of(hint) if dataclasses.is_dataclass(hint) else hint  # type: ignore[arg-type]


def _checked(hint: Any, annotations: tuple[Any, ...]) -> Any:
    """Returns the type of a value in a file with the checks that annotations stand for; null needs none."""
    if get_origin(hint) in (Union, UnionType) and type(None) in get_args(hint):
        others = tuple(each for each in get_args(hint) if each is not type(None))
        return _checked(Union[others], annotations) | None  # noqa: UP007
    own = [TYPES[item.name] for item in annotations if isinstance(item, Format)]
    own += [section_of(feature_kinds()[item.key]) for item in annotations if isinstance(item, KeysOf)]  # type: ignore[arg-type]
    whole = next((each for each in own if not isinstance(each, (AfterValidator, StringConstraints, OneOf))), None)
    checks = (check for item in annotations for check in _checks(item))
    return reduce(lambda checked, check: Annotated[checked, check], checks, whole or _type_of(hint))


def _checks(annotation: Any) -> Iterator[Any]:
    """Yields what Pydantic has for an annotation; nothing for one that checks nothing."""
    match annotation:
        case Limits():
            yield Field(**{name: limit for name, limit in vars(annotation).items() if limit is not None})
        case Choices(names):
            yield OneOf(names)
        case Format(name) if isinstance(TYPES[name], (AfterValidator, StringConstraints, OneOf)):
            yield TYPES[name]
        case Distinct(at_least=at_least, at_most=at_most):
            yield from (references.Distinct, Field(min_length=at_least, max_length=at_most))
