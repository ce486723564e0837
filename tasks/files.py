"""Files that a person names, or that a file names: any text may stand there, and anything may lie where it leads."""

import errno
from pathlib import Path

MOST_NAME_BYTES, MOST_PATH_BYTES = 255, 4000
"""What Linux's file systems take for a name and, with what a glob adds to it, for a path."""
MAX_BYTES = 4_000_000
"""Of a file that is read as YAML, which takes the reader half a minute."""


def text_of(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """The text of a file; no more of it is read than that. Raises OSError or UnicodeDecodeError."""
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes / 1e6:g} MB")
    return content.decode("utf-8")


def beside(folder: Path, name: str) -> Path:
    """The path that `name`, as seen from `folder`, means. Raises ValueError where there can be none."""
    sizes = [len(part.encode("utf-8", "replace")) for part in name.split("/")]
    if "\0" in name or max(sizes) > MOST_NAME_BYTES or sum(sizes) + len(sizes) > MOST_PATH_BYTES:
        raise ValueError("is no path that a file can have")
    try:
        return folder / Path(name).expanduser()
    except RuntimeError as error:  # ~somebody who has no home here
        raise ValueError("begins with a user who has no folder on this machine") from error


def is_file(folder: Path, name: str) -> bool:
    """Whether `name`, as seen from `folder`, is a plain file: no folder, no device, no pipe that nobody writes to."""
    try:
        return beside(folder, name).is_file()
    except (OSError, ValueError):
        return False
