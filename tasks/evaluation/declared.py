"""Loader of small declarative YAML files into pydantic sections, with all faults reported by line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from ringmaster.errors import BatchFileError
from ringmaster.tasks.batch import Fault, document
from ringmaster.tasks.batch.data_schema import Section
from ringmaster.tasks.batch.faults import Finding, place_text
from ringmaster.tasks.batch.wording import findings
from ringmaster.tasks.files import text_of

Entry = TypeVar("Entry", bound=Section)


def load(path: Path, schema: type[Entry], *, rules: Callable[[Entry], Iterable[Finding]], what: str) -> Entry:
    """Loads the YAML file `path` as `schema`. Raises BatchFileError with all faults.

    rules: yields the faults that remain although each value is of its type.
    what: a description of the file for messages, such as "a file of tests".
    """
    try:
        text = text_of(path)
    except (OSError, UnicodeDecodeError) as error:
        raise BatchFileError([Fault("", None, f"cannot be read: {error}", f"name {what}", str(path))]) from error
    read = document.read(text)
    found = list(read.findings)
    entry = None
    if read.data is not None:
        try:
            entry = schema.model_validate(read.data, context={"folder": path.parent.resolve()})
            found += rules(entry)
        except ValidationError as error:
            found += findings(error, root=schema)
            found += _faults_of_rest(read.data, error, schema, rules, folder=path.parent.resolve())
    if found:
        faults = [
            Fault(place_text(f.place), f.line or read.line(f.place), f.message, f.remedy, path.name) for f in found
        ]
        raise BatchFileError(sorted(faults, key=lambda fault: fault.line or 0))
    assert entry is not None, "a file without a fault has an entry"
    return entry


def _faults_of_rest(
    data: Mapping[str, Any],
    error: ValidationError,
    schema: type[Entry],
    rules: Callable[[Entry], Iterable[Finding]],
    *,
    folder: Path,
) -> list[Finding]:
    """Returns the faults that the rules find in the keys that are right; none where a wrong one is required."""
    wrong = {fault["loc"][0] for fault in error.errors() if fault["loc"]}
    try:
        entry = schema.model_validate({k: v for k, v in data.items() if k not in wrong}, context={"folder": folder})
    except ValidationError:
        return []
    return list(rules(entry))
