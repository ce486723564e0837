"""Generator of the reference page of all batch file keys: `python -m ringmaster.tasks.batch.reference`."""

import json
import math
import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from ringmaster.files import MAX_BYTES
from ringmaster.tasks.batch.grid import MAX_JOBS, MAX_KEYS, MAX_VALUES
from ringmaster.tasks.batch.schema import BatchEntry
from ringmaster.tasks.batch.sections import Section
from ringmaster.text import MAX_FAULTS, markdown_table

INTRODUCTION = f"""# Batch files

Begin with [mixed_batch.yaml](../examples/mixed_batch.yaml); `ringmaster run FILE --dry-run` names all faults of a file.
Editors that know JSON schemas complete the keys:

    ringmaster schema > batch.schema.json

and `# yaml-language-server: $schema=batch.schema.json` as the file's first line. `ringmaster schema sweep`,
`retraining`, `policy` and `tests` print those of the other files. Schemas have the keys, types and limits of single
values; rules between values are checked by the commands.

Limits: {MAX_JOBS:,} jobs, including those of grids; {MAX_VALUES:,} values in these; {MAX_KEYS} keys of a grid entry;
{MAX_BYTES // 1_000_000} MB. The first {MAX_FAULTS} faults are printed.
"""
TITLES = {
    "BatchEntry": "The batch",
    "JobEntry": "A job, in `jobs`",
    "GridEntry": "A grid, in `grid`",
    "DatasetVersion": "Dataset version",
}
LINKS = {
    "EvaluationSection": "[metrics](evaluation.md#metrics)",
    "OptimizerSection": "[formulas](optimizers.md#optimizers)",
    "ScheduleSection": "[formulas](optimizers.md#schedules)",
}
"""What a section's description refers to."""
OPTIONAL = r", or leave (the key|it) out(: .*)?$"
REDUNDANT = r"(,? such as [^\s,;]+|, else (true|false))$"


def reference() -> str:
    """Returns the page as Markdown: a table for each kind of section, in the order of their first use."""
    return "\n".join([INTRODUCTION, *(_described(section) for section in _sections(BatchEntry))])


def _sections(section: type[Section]) -> dict[type[Section], None]:
    """Returns a section and all sections within it, each once, the outer ones first."""
    sections, waiting = dict.fromkeys([section]), [section]
    while waiting:
        for field in waiting.pop(0).model_fields.values():
            inner = [each for each in _sections_of(field.annotation) if each not in sections]
            sections |= dict.fromkeys(inner)
            waiting += inner
    return sections


def _sections_of(annotation: Any) -> Iterator[type[Section]]:
    """Yields the sections that a field may hold, including those in lists and mappings."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, Annotated, list, dict):
        for inner in get_args(annotation):
            yield from _sections_of(inner)


def _described(section: type[Section]) -> str:
    columns = [
        name
        for name, field in section.model_fields.items()
        if not _default(field) and (field.description or "").startswith("the column that holds")
    ]
    grouped = columns if len(columns) > 1 else []
    documented = _sections(BatchEntry)
    inherited = [name for base in section.__bases__ if base in documented for name in base.model_fields]
    rows = [
        (_key(name, field), _default(field), _meaning(field))
        for name, field in section.model_fields.items()
        if name not in [*grouped, *inherited]
    ]
    if grouped:
        names = ", ".join(f"`{name}`" for name in grouped)
        rows.append((names, "", "names of columns, by [kind](data.md#kinds)"))
    link = LINKS.get(section.__name__)
    description = " ".join([*(section.__doc__ or "").split(), *([f"See {link}."] if link else [])])
    table = markdown_table(("key", "default", "give"), rows)
    return f"## {_title(section)}\n\n{description}\n\n{table}\n"


def _title(section: type[Section]) -> str:
    return TITLES.get(section.__name__, section.__name__.removesuffix("Section"))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*needed*"
    value = field.get_default(call_default_factory=True)
    if value in (None, [], {}) or isinstance(value, Section):
        return ""
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()
    text = text if text.isprintable() else json.dumps(value)  # a line break would end the row of the table
    return f"`{text}`".replace("|", "\\|")


def _key(name: str, field: FieldInfo) -> str:
    """Returns the key, with a link to the section that its value is."""
    for inner in _sections_of(field.annotation):
        return f"[`{name}`](#{_anchor(_title(inner))})"
    return f"`{name}`"


def _meaning(field: FieldInfo) -> str:
    """Returns the description without what the column of defaults contains: an example of one, or that there is
    none."""
    description = " ".join((field.description or "").split()).replace("|", "\\|")
    return description if field.is_required() else re.sub(REDUNDANT if _default(field) else OPTIONAL, "", description)


def _anchor(title: str) -> str:
    """Returns the anchor that GitHub gives to a heading."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")


if __name__ == "__main__":
    print(reference(), end="")
