"""Dotted names: how a batch file names a user's function or class, and how another process finds it."""

import difflib
import importlib
from typing import Any


def resolve(dotted: str) -> Any:
    """Returns the object that "package.module:name" names; `name` may be nested ("module:Class.method").

    Raises ValueError, with a remedy, where the name is malformed, is not found, or is in `__main__`, which no other
    process can import. Errors that importing the module raises are propagated.
    """
    module_name, colon, path = dotted.partition(":")
    if not colon or not module_name or not path:
        raise ValueError(f"{dotted!r} is no dotted name. To fix: write package.module:function")
    if module_name == "__main__":
        raise ValueError(
            f"{dotted!r} is defined in the script that was started, where no worker process can find it. "
            f"To fix: move {path} into a module of its own beside the batch file, and name it MODULE:{path}"
        )
    found = _import(module_name, dotted=dotted)
    for part in path.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, [name for name in dir(found) if not name.startswith("_")])
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise ValueError(f"{dotted!r}: module {module_name!r} has no {path!r}{hint}")
        found = getattr(found, part)
    return found


def _import(module_name: str, *, dotted: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A missing import inside the user's module is propagated; only a missing module becomes a ValueError.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{dotted!r}: there is no module {error.name!r}. To fix: put it beside the batch file, "
            f"or install the package that has it"
        ) from error
