"""Commands of a user who may only read a folder, and small disks."""

import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

WRITE = 0o222


def dropping_rights():
    """The words before a command that give it the rights of an ordinary user, also where root starts it."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root's rights can be dropped only by setpriv")
    return ["setpriv", "--inh-caps=-all", "--bounding-set=-all"]


def without_rights(*command, **options):
    """Runs a command that has the rights of an ordinary user; returns its result."""
    words = [*dropping_rights(), *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)


def reading_by(server):
    """Returns a function that runs a command of Ringmaster on a home, in a process of a server without rights."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}

    def read(home, *arguments):
        result, _ = server.run(*arguments, environment=variables | {"RINGMASTER_HOME": str(home)}, folder=Path.cwd())
        return result

    return read


def close_to_writers(home):
    """Takes the right to write from everything in a home, which `open_to_writers` gives back; returns its files."""
    for path in (home, *home.rglob("*")):
        path.chmod(path.stat().st_mode & ~WRITE)
    return files_in(home)


def open_to_writers(home):
    """Gives the owner all rights in a home again, so that it can be removed."""
    for path in (home, *home.rglob("*")):
        path.chmod(path.stat().st_mode | 0o700)


def files_in(folder):
    """Returns everything below a folder."""
    return sorted(Path(folder).rglob("*"))


@contextmanager
def small_disk(folder, *, size):
    """Mounts a disk of a size, such as "64k", at a new folder, which needs root."""
    if os.geteuid() != 0:
        pytest.skip("a small disk can be made only as root")
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be made: {mounted.stderr.decode()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
