"""Paths of the example files that come with the package, for forms and commands that run in any folder."""

from __future__ import annotations

import os
from pathlib import Path

from ringmaster.flows import settings

EXAMPLES = Path(__file__).absolute().parents[1] / "examples"


def located(path: str | Path) -> Path:
    """Returns the path, or the package's own file for `examples/...` where the working directory has no such file."""
    path = Path(path)
    if path.parts[:1] == (EXAMPLES.name,) and not path.exists():
        return EXAMPLES.parent / path
    return path


def enter_folder_of_home() -> dict[str, str]:
    """A pull step for Prefect: changes to the folder that holds RINGMASTER_HOME before a flow run.

    Relative paths in forms start there, as they do for commands in that folder. The step does not enter the package's
    folder, which Prefect would put on the import path.
    """
    folder = settings.home().parent
    os.chdir(folder)
    return {"directory": str(folder)}
