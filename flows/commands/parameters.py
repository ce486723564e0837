"""Parameters that features add to the commands of others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


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
    """Returns a decorator of a command with parameters that functions give (`OPTIONS` of features), and no person."""

    def without_parameters(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        kept = [each for each in signature.parameters.values() if each.name not in names]
        command.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return command

    return without_parameters
