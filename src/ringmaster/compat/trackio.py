"""Undocumented names of Trackio. Importing this imports no Trackio."""

import os
from pathlib import Path
from typing import Any


def storage_in(folder: Path) -> Any:
    """Returns Trackio's storage on this machine, in a folder.

    `trackio.init` starts a server and threads for each run, prints, and chooses the times of points itself. Trackio
    reads the folder from the environment when it is imported: a process has one.

    Raises RuntimeError where it has another one.
    """
    os.environ["TRACKIO_DIR"] = str(folder)
    from trackio.sqlite_storage import SQLiteStorage
    from trackio.utils import TRACKIO_DIR

    if Path(TRACKIO_DIR) != folder:
        raise RuntimeError(f"Trackio writes to {TRACKIO_DIR} in this process, and not to {folder}")
    return SQLiteStorage
