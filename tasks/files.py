"""Checked access to files that a person or another file names; such a name can be any text and lead to anything."""

import errno
from pathlib import Path

MOST_NAME_BYTES, MOST_PATH_BYTES = 255, 4000
"""The longest file name and the longest path that Linux's file systems accept; a glob adds to the path."""
MAX_BYTES = 4_000_000
"""The size limit of a file that is read as YAML; parsing that much takes half a minute."""


def text_of(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """Returns the text of a file, of which at most `max_bytes` are read.

    Raises OSError if the file is larger or cannot be read, and UnicodeDecodeError if it is not UTF-8.
    """
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes / 1e6:g} MB")
    return content.decode("utf-8")


def path_in(folder: Path, name: str) -> Path:
    """Returns the path of `name` relative to `folder`. Raises ValueError if no file can have such a path."""
    sizes = [len(part.encode("utf-8", "replace")) for part in name.split("/")]
    if "\0" in name or max(sizes) > MOST_NAME_BYTES or sum(sizes) + len(sizes) > MOST_PATH_BYTES:
        raise ValueError("is no path that a file can have")
    try:
        return folder / Path(name).expanduser()
    except RuntimeError as error:  # "~user" of a user without a home folder
        raise ValueError("begins with a user who has no folder on this machine") from error


def is_file(folder: Path, name: str) -> bool:
    """Returns whether `name`, relative to `folder`, is a plain file: no folder, no device, and no named pipe."""
    try:
        return path_in(folder, name).is_file()
    except (OSError, ValueError):
        return False
