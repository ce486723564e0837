"""Validated listing of the files in an untrusted model folder.

A file that is not a plain file of the folder is refused. A link to a file is followed if it stays in the folder.
Hugging Face's cache stores a model in `models--OWNER--NAME`, where `snapshots/REVISION/model.safetensors` is a link to
`../../blobs/...`. In such a snapshot a link may therefore lead anywhere in that model's cache folder, but not out of
it. Links to folders, pipes and devices are refused.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from pathlib import Path, PurePosixPath

MOST_FILES = 10_000
MOST_FAULTS = 20
REMEDY = "give a folder with the model's own files alone"


def files_of(folder: Path) -> list[tuple[str, Path]]:
    """Returns (relative name, path of the bytes) of every file in a model's folder, sorted by name.

    Raises ValueError if a file lies outside of the folder, or if its name could be taken for another's.
    """
    root = folder.resolve()
    home = _home_of(root)
    found: list[tuple[str, Path]] = []
    faults: list[str] = []
    for place, folders, names in os.walk(root):
        for name in [*folders, *names]:
            path = Path(place, name)
            relative = path.relative_to(root).as_posix()
            if fault := name_fault(relative):
                faults.append(f"{folder} has a file {relative!r}, whose name {fault}. To fix: rename it")
            elif name in names or path.is_symlink():
                try:
                    found.append((relative, _file_at(path, relative, folder, home)))
                except ValueError as error:
                    faults.append(str(error))
        if len(found) + len(faults) > MOST_FILES:
            raise ValueError(f"{folder} has more than {MOST_FILES:,} files. To fix: {REMEDY}")
    if faults:
        more = f"; and {len(faults) - MOST_FAULTS} more" if len(faults) > MOST_FAULTS else ""
        raise ValueError("; ".join(faults[:MOST_FAULTS]) + more)
    return sorted(found, key=lambda each: Path(each[0]))


def name_fault(name: str) -> str:
    """Returns why a file of a model may not have this relative name, or "" if it may."""
    if any(unicodedata.category(c)[0] == "C" for c in name):  # bytes that are not UTF-8 are decoded as lone surrogates
        return "has control characters, or bytes that are no UTF-8"
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "/".join(parts) != name:
        return "leads out of the folder"
    return ""


def _file_at(path: Path, relative: str, folder: Path, home: Path) -> Path:
    """Returns the resolved path of a file. Raises ValueError if it is no file, or a link that leads out of `home`."""
    try:
        real = path.resolve(strict=True)
        kind = real.stat().st_mode
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        raise ValueError(
            f"{folder}: {relative} is a link that leads nowhere. To fix: remove it, or {REMEDY}"
        ) from error
    if not real.is_relative_to(home):
        raise ValueError(f"{folder}: {relative} is a link to {real}, outside of the model. To fix: {REMEDY}")
    if not stat.S_ISREG(kind):
        what = "a link to a folder" if stat.S_ISDIR(kind) else "a pipe, a socket or a device"
        raise ValueError(f"{folder}: {relative} is {what}, and no file. To fix: remove it, or {REMEDY}")
    return real


def _home_of(root: Path) -> Path:
    """Returns the folder that links must not leave: the model's own, or its whole folder in Hugging Face's cache."""
    for above in root.parents:
        if above.name.startswith("models--") and root.relative_to(above).parts[0] == "snapshots":
            return above
    return root
