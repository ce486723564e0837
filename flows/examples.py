"""The example files that come with the package, for forms and commands that name them from any folder."""

from __future__ import annotations

import os
from pathlib import Path

from ringmaster.flows import settings

EXAMPLES = Path(__file__).absolute().parents[1] / "examples"


def located(path: str | Path) -> Path:
    """The file of that name; `examples/...` is one of the package's where the working directory has none."""
    path = Path(path)
    if path.parts[:1] == (EXAMPLES.name,) and not path.exists():
        return EXAMPLES.parent / path
    return path


def enter_folder_of_home() -> dict[str, str]:
    """A step of Prefect's before a run: the working directory is the folder that holds RINGMASTER_HOME.

    Relative paths in forms start there, as they do for commands in that folder. It is not the package's folder, which
    Prefect would put on the import path.
    """
    folder = settings.home().parent
    os.chdir(folder)
    return {"directory": str(folder)}
