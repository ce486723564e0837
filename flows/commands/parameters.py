"""Parameters of commands: those that features add to the commands of others, and times that people write."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from ringmaster.errors import InputError


def with_parameters(
    command: Callable[..., None], call: Callable[..., None], **parameters: tuple[Any, Any]
) -> Callable[..., None]:
    """Returns a command of the name and the parameters of another one, and with further ones.

    Args:
        command: the other one.
        call: what the command does, with all parameters as keywords; a function of its own, which becomes the command.
        parameters: the annotation (`Annotated[type, typer.Option(...)]`) and the default of each parameter that is
            added, or that replaces one of the same name; `inspect.Parameter.empty` for none.
    """
    keyword = inspect.Parameter.KEYWORD_ONLY
    signature = inspect.signature(command, eval_str=True)
    by_name = {each.name: each.replace(kind=keyword) for each in signature.parameters.values()}
    for name, (annotation, default) in parameters.items():
        by_name[name] = inspect.Parameter(name, keyword, annotation=annotation, default=default)
    functools.update_wrapper(call, command)
    call.__signature__ = signature.replace(parameters=[*by_name.values()])  # type: ignore[attr-defined]
    return call


def internal(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator of a command with sequences that functions give (`OPTIONS` of features), and no person."""

    def without_parameters(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        kept = [each for each in signature.parameters.values() if each.name not in names]
        command.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return command

    return without_parameters


def with_values(options: Mapping[str, Any], name: str, *values: Any) -> dict[str, Any]:
    """Returns the parameters of a command with further values of one that functions give: others may have given some.

    Args:
        options: the parameters.
        name: one of the names in `internal`, whose value is a sequence.
        values: the further values.
    """
    return {**options, name: (*options.get(name, ()), *values)}


UNITS_S = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "": 1.0}
CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
DURATION = re.compile(r"(\d+(?:\.\d+)?)([dhms]?)")


def seconds_until(text: str, *, now: datetime | None = None) -> float:
    """Returns the seconds from now to a time of the day, or of a duration such as 6h, 1h30m or 3600.

    A time of the day that is over is that of tomorrow. Raises InputError where the text is neither.
    """
    now = now or datetime.now().astimezone()
    if result := CLOCK.fullmatch(text):
        then = now.replace(hour=int(result[1]), minute=int(result[2]), second=0, microsecond=0)
        return ((then if then > now else then + timedelta(days=1)) - now).total_seconds()
    parts = DURATION.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        seconds = sum(float(number) * UNITS_S[unit] for number, unit in parts)
        if seconds > 0:
            return seconds
    raise InputError(
        [f"--deadline {text!r} is not a valid time. To fix: give a time of the day, 06:00, or 6h, 90m or 3600"]
    )
