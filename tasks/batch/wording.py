"""Translation of Pydantic's errors into findings: the fault at a place, and the remedy."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ringmaster.tasks.batch.data_schema import Section
from ringmaster.tasks.batch.faults import Finding, Place, got
from ringmaster.tasks.batch.references import closest
from ringmaster.tasks.batch.schema import BatchEntry, misspelt, section_at

_WRONG_TYPE = {
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "list_type": "must be a list",
    "model_type": "must be a mapping",
    "string_type": "must be text",
}
_OUT_OF_RANGE = {
    "greater_than": ("must be greater than", "gt"),
    "greater_than_equal": ("must be at least", "ge"),
    "less_than": ("must be less than", "lt"),
    "less_than_equal": ("must be at most", "le"),
}


def findings(error: ValidationError, *, at: Place = (), root: type[Section] = BatchEntry) -> list[Finding]:
    """Returns a finding for every error of a validation, at places below `at` of a file of type `root`."""
    found = []
    for details in error.errors(include_url=False):
        place = (*at, *details["loc"])
        section = section_at(place[:-1], root=root)
        if details["type"] == "missing" and section and place[-1] in misspelt(details["input"], section):
            continue
        found.append(_finding(place, details, root))
    return found


def _finding(place: Place, details: Mapping[str, Any], root: type[Section]) -> Finding:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "reference":
        return Finding(place, context["problem"], context["remedy"])
    if kind == "extra_forbidden":
        return _unknown_key(place, root)
    remedy = f"give {_description(place, root)}"
    if kind == "missing":
        return Finding(place, "is missing", remedy)
    if kind in _OUT_OF_RANGE:
        words, key = _OUT_OF_RANGE[kind]
        bound = context[key]
        limit = f"{bound:g}" if bound < 10**6 else f"{bound:,.0f}"
        return Finding(place, f"{words} {limit}, {got(value)}", remedy)
    if kind == "too_short":
        return Finding(place, "is empty", remedy)
    if kind == "none_required":
        return Finding(place, f"is not possible yet, {got(value)}", remedy)
    if kind == "string_pattern_mismatch":
        return Finding(place, f"is no valid name, {got(value)}", remedy)
    if kind == "string_type" and isinstance(value, (int, float)):
        remedy += "; put quotes around text that looks like a number"
    return Finding(place, f"{_WRONG_TYPE.get(kind, details['msg'].lower())}, {got(value)}", remedy)


def _unknown_key(place: Place, root: type[Section]) -> Finding:
    key = str(place[-1])
    section = section_at(place[:-1], root=root)
    assert section is not None, f"an unknown key where any may stand: {place}"
    return Finding(place, "is an unknown key", closest(key, section.model_fields, what="The keys here are"))


def _description(place: Place, root: type[Section]) -> str:
    """Returns the schema's description of the nearest described key at or above `place`."""
    while place:
        key = place[-1]
        section = section_at(place[:-1], root=root)
        if isinstance(key, str) and section is not None and key in section.model_fields:
            return section.model_fields[key].description or key
        place = place[:-1]
    return "a value of that kind"
