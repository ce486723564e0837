"""Commands under their former names, which work as before and print the new name."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def renamed(command: Callable[..., None], *, group: str) -> Callable[..., None]:
    """The command as it was called before it belonged to a group."""
    name = command.__name__.replace("_", "-")

    @functools.wraps(command)
    def under_former_name(*args: Any, **options: Any) -> None:
        sys.stderr.write(f"`ringmaster {name}` is now `ringmaster {group} {name}`\n")
        command(*args, **options)

    return under_former_name
