"""Folders in which libraries store code that they compile, where no other user of the machine can place files.

By default torch compiles into a folder of the temporary folder that is named after the user. Whoever creates it first
decides what code is loaded.
"""

import os
import platform
import stat
from collections.abc import Iterator
from pathlib import Path

from ringmaster.errors import InputError

CODE_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "torch-extensions",
    "HF_MODULES_CACHE": "huggingface-modules",
    "MPLCONFIGDIR": "matplotlib",
}
"""Environment variables of the folders, and our names of them."""

HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
"""Environment variable that turns off torch's precompiled headers, whose folder is always in the temporary folder."""


def own_caches(home: Path | None = None) -> dict[str, str]:
    """Returns environment variables that name folders in the home, which are created; what the user has set stays.

    Each machine has its own, as code is compiled for its processor, and so has each user of a home that a group shares.
    Downloaded models stay in `~/.cache/huggingface`, and what numba compiles next to its source or in `~/.cache`,
    unless `~` is another user's or everybody may write there, as where a service runs without a folder of its own.

    home: by default RINGMASTER_HOME, or `.ringmaster` in the working folder.

    Raises InputError, with all faults, where a folder belongs to another user or can be written by one.
    """
    home = home or Path(os.environ.get("RINGMASTER_HOME", ".ringmaster")).absolute()
    folder = home / "cache" / "libraries" / (platform.node() or "localhost") / str(os.geteuid())
    caches = {name: os.environ.get(name) or str(folder / own) for name, own in CODE_CACHES.items()}
    if faults := [fault for name, path in caches.items() for fault in _faults(name, Path(path).absolute(), home)]:
        raise InputError(faults)
    caches[HEADERS] = os.environ.get(HEADERS, "0")
    try:
        theirs = Path.home() / ".cache"
    except RuntimeError:  # a service's user without a home
        theirs = Path("/")
    if not {"XDG_CACHE_HOME", "HF_HOME"} & os.environ.keys() and not _is_private(theirs):
        caches["XDG_CACHE_HOME"] = str(folder / "others")
        models = theirs / "huggingface"
        # In the image of a container, models may lie in a folder that root has filled.
        is_kept = models.is_dir() and all(map(_is_ours, (models, theirs, theirs.parent)))
        caches["HF_HOME"] = str(models if is_kept else home / "cache" / "huggingface")
    return caches


def _faults(name: str, path: Path, home: Path) -> Iterator[str]:
    """Creates a folder, and yields a fault where it is not this user's alone."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        yield f"{name}: the folder {path} cannot be created ({error.strerror}). To fix: name another folder in {name}"
        return
    target = path.resolve()
    owned = [path, target, *(each for each in path.parents if each.is_relative_to(home))]
    for each in dict.fromkeys([*owned, *path.parents, *target.parents]):
        if why := _why_unsafe(each, is_inner=each in (path, target), is_owned=each in owned):
            yield (
                f"{name}: {each} {why}, and code that lies in {path} is run. To fix: chmod go-w {each} if it is yours, "
                f"else remove it, or name another folder in {name}"
            )
            return


def _why_unsafe(path: Path, *, is_inner: bool, is_owned: bool) -> str:
    """Returns why others could place files in a folder or put another one in its place; "" where they cannot."""
    stat_of = path.lstat()
    is_shared = bool(int(os.environ.get("RINGMASTER_UMASK") or "077", 8) & stat.S_IWGRP == 0)
    if is_owned and stat_of.st_uid not in (os.geteuid(), 0) and (is_inner or not is_shared):
        return "belongs to another user"
    if stat.S_ISLNK(stat_of.st_mode):  # its mode is meaningless
        return ""
    if is_inner:
        writers = stat_of.st_mode & (stat.S_IWOTH if is_shared else stat.S_IWOTH | stat.S_IWGRP)
        return "can be written by others" if writers else ""
    is_open = stat_of.st_mode & stat.S_IWOTH and not stat_of.st_mode & stat.S_ISVTX
    return "can be changed by everybody" if is_open else ""


def _is_private(path: Path) -> bool:
    """Whether the nearest folder of a path that is there is this user's, and not everybody may write to it."""
    there = next((each for each in (path, *path.parents) if each.is_dir()), None)
    assert there is not None, "the root is there"
    return _is_ours(there) and there.stat().st_uid == os.geteuid()


def _is_ours(path: Path) -> bool:
    """Whether a folder is this user's or root's, and not everybody may write to it."""
    stat_of = path.stat()
    return stat_of.st_uid in (os.geteuid(), 0) and not stat_of.st_mode & stat.S_IWOTH
