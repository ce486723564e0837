"""Titles of a flow's parameters in Prefect's forms, and parameters that the forms leave out."""

from __future__ import annotations

from typing import Any, cast

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

HIDDEN = cast(Any, SkipJsonSchema)()
"""Metadata of the type of a parameter that few people change: the form does not show it, but a run may be given it."""


def titled(title: str, **bounds: Any) -> Any:
    """Returns the metadata of a parameter's type: the title of its field, and the bounds of its values.

    Prefect uses the name of a parameter as its title, whatever `Field.title` says. An entry of the JSON schema wins.
    """
    return Field(json_schema_extra={"title": title}, **bounds)
