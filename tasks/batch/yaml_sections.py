"""YAML files whose sections are pydantic models: loading them, with all faults by line, and the words of the faults."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from ringmaster.errors import BatchFileError
from ringmaster.files import text_of
from ringmaster.findings import Finding, Location, got
from ringmaster.tasks.batch import document
from ringmaster.tasks.batch.document import Fault, FileKind, place_text
from ringmaster.tasks.batch.references import closest
from ringmaster.tasks.batch.schema import BatchEntry, misspelt, section_at, without_branches
from ringmaster.tasks.batch.sections import Section

Entry = TypeVar("Entry", bound=Section)

_PROBLEMS = {
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "list_type": "must be a list",
    "model_type": "must be a mapping",
    "string_type": "must be text",
    "none_required": "is not possible yet",
    "string_pattern_mismatch": "is not a valid name",
}
_OUT_OF_RANGE = {
    "greater_than": ("must be greater than", "gt"),
    "greater_than_equal": ("must be at least", "ge"),
    "less_than": ("must be less than", "lt"),
    "less_than_equal": ("must be at most", "le"),
}


def findings(error: ValidationError, *, at: Location = (), root: type[Section] = BatchEntry) -> list[Finding]:
    """Returns a finding for every error of a validation, at places below `at` of a file of type `root`."""
    faults = []
    for details in error.errors(include_url=False):
        place = without_branches((*at, *details["loc"]), root=root)
        section = section_at(place[:-1], root=root)
        if details["type"] == "missing" and section and place[-1] in misspelt(details["input"], section):
            continue
        faults.append(_finding(place, details, root))
    return faults


def _finding(place: Location, details: Mapping[str, Any], root: type[Section]) -> Finding:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    remedy = f"give {_description(place, root)}"
    match kind:
        case "reference":
            return Finding(place, context["problem"], context["remedy"])
        case "extra_forbidden":
            section = section_at(place[:-1], root=root)
            assert section is not None, f"an unknown key where any may stand: {place}"
            remedy = closest(str(place[-1]), section.model_fields, what="The keys here are")
            return Finding(place, "is an unknown key", remedy)
        case "missing":
            return Finding(place, "is missing", remedy)
        case "too_short":
            return Finding(place, "is empty", remedy)
        case "string_type" if isinstance(value, (int, float)):
            remedy += "; put quotes around text that looks like a number"
    problem = _PROBLEMS.get(kind, details["msg"].lower())
    if kind in _OUT_OF_RANGE:
        words, key = _OUT_OF_RANGE[kind]
        bound = context[key]
        problem = f"{words} {bound:g}" if bound < 10**6 else f"{words} {bound:,.0f}"
    return Finding(place, f"{problem}, {got(value)}", remedy)


def _description(place: Location, root: type[Section]) -> str:
    """Returns the schema's description of the nearest described key at or above `place`."""
    while place:
        key = place[-1]
        section = section_at(place[:-1], root=root)
        if isinstance(key, str) and section is not None and key in section.model_fields:
            return section.model_fields[key].description or key
        place = place[:-1]
    return "a value of that kind"


def read_text(path: Path, *, what: str) -> str:
    """Returns the text of a file. Raises BatchFileError if it cannot be read.

    Args:
        path: The file.
        what: A description of the file for messages, such as "a file of tests".
    """
    try:
        return text_of(path)
    except OSError as error:
        message = f"cannot be read: {error.strerror or type(error).__name__}"
        raise BatchFileError([Fault("", None, message, f"name {what}", str(path))]) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise BatchFileError(
            [Fault("", line, f"is not UTF-8 text: {error.reason}", "save it as UTF-8", str(path))]
        ) from error


def read_document(path: Path, *, what: str, kind: FileKind | None = None) -> document.YamlDocument:
    """Returns the YAML document in a file, as `read_text` and `document.read` read it."""
    return document.read(read_text(path, what=what), kind=kind)


def file_error(findings: Iterable[Finding], read: document.YamlDocument, *, file: str) -> BatchFileError:
    """Returns the error with these faults, one for each place and message, in the order of the lines of the file."""
    faults = {
        Fault(place_text(f.place), f.line or read.line(f.place), f.message, f.remedy, file): None for f in findings
    }
    return BatchFileError(sorted(faults, key=lambda fault: fault.line or 0))


def load_section(
    path: Path, schema: type[Entry], *, rules: Callable[[Entry], Iterable[Finding]], kind: FileKind
) -> Entry:
    """Loads the YAML file `path` as `schema`. Raises BatchFileError with all faults.

    Args:
        path: The file.
        schema: The type of the whole file.
        rules: Yields the faults that remain although each value is of its type.
        kind: The kind of the file.
    """
    read = read_document(path, what=kind, kind=kind)
    if read.data is None:
        raise file_error(read.findings, read, file=path.name)
    faults = list(read.findings)
    folder = path.parent.resolve()
    try:
        entry = schema.model_validate(read.data, context={"folder": folder})
    except ValidationError as error:
        faults += [*findings(error, root=schema), *_faults_of_rest(read.data, error, schema, rules, folder=folder)]
        raise file_error(faults, read, file=path.name) from error
    if faults := [*faults, *rules(entry)]:
        raise file_error(faults, read, file=path.name)
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
