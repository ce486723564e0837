"""Makes the environment of a lock by uv, once on each machine, and says what is in it.

A lock of files keeps other makers waiting. An environment counts from the moment its description is written, which is
the last thing; what a maker that was killed has left is removed. uv inherits the lock, so that it is held for as long
as uv writes, also after the death of the process that has started it.
"""

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ringmaster.codec import digest
from ringmaster.distribution import DISTRIBUTION
from ringmaster.errors import InterpreterError
from ringmaster.features.environment import probe
from ringmaster.features.environment.lock_files import PYTHON_VERSION, UV_LOCK, kept_lock
from ringmaster.files import read_value, write_value
from ringmaster.techniques.processes.rank_environment import first_in_path
from ringmaster.text import shortened

NEEDED = frozenset({"numpy", "psutil", "pyarrow", "pyyaml", "safetensors", "torch", "transformers"})
"""The packages that a process that trains imports."""
MAX_MESSAGE = 1500  # characters of what uv says
NOT_PASSED_ON = frozenset({"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "UV_PROJECT_ENVIRONMENT", "UV_PYTHON"})
"""Environment variables that would have uv, or a Python, use another environment."""


@dataclass(frozen=True, kw_only=True)
class InstalledEnvironment:
    """What a Python has.

    python: its path. version: such as "3.11.4".
    folder: where its packages are. packages: their versions, by their names in lower case with "-".
    """

    python: str
    version: str
    folder: str
    packages: Mapping[str, str]

    @property
    def digest(self) -> str:
        """The digest of the versions, for a Python that no lock defines."""
        return digest([self.version, self.packages], length=32)

    def lacking(self) -> list[str]:
        """Returns what it lacks to train by Ringmaster, such as "torch>=2.11 (it has 2.5.0)"."""
        about = metadata(DISTRIBUTION)
        result = []
        if not SpecifierSet(about["Requires-Python"]).contains(self.version):
            result.append(f"Python{about['Requires-Python']} (it has {self.version})")
        for needed in map(Requirement, about.get_all("Requires-Dist") or ()):
            present = self.packages.get(needed.name.lower())
            is_needed = needed.name.lower() in NEEDED and needed.marker is None
            if is_needed and (present is None or not needed.specifier.contains(present, prereleases=True)):
                result.append(f"{needed} (it has {present or 'none'})")
        return sorted(result)


def uv_program() -> str | None:
    """Returns uv: the one beside this Python, else the first on the PATH; None where there is none."""
    return shutil.which("uv", path=first_in_path(sys.executable))


_described: dict[str, tuple[int, InstalledEnvironment]] = {}


def describe(python: str) -> InstalledEnvironment:
    """Returns what a Python has. Raises InterpreterError where it does not run.

    One is asked again once packages were installed or removed.
    """
    known = _described.get(python)
    if known is not None and known[0] == _stamp(known[1].folder):
        return known[1]
    variables = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
    try:
        answer = subprocess.run(
            [python, str(Path(probe.__file__))],
            capture_output=True,
            env=variables,
            stdin=subprocess.DEVNULL,
            check=True,
        )
        environment = InstalledEnvironment(python=python, **json.loads(answer.stdout))
    except (OSError, subprocess.CalledProcessError, ValueError, TypeError) as error:
        reason = (
            error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else str(error)
        )
        raise InterpreterError(
            f"environment: {python} is no Python that runs: {_in_a_line(reason)}. To fix: name one of 3.8 or later"
        ) from error
    _described[python] = _stamp(environment.folder), environment
    return environment


def _stamp(folder: str) -> int:
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return 0


def made(key: str, *, lock: str, root: Path) -> InstalledEnvironment:
    """Returns the environment of a lock that is kept under its digest `key`; makes it where it is not there.

    lock: the name of the lock's file. root: the folder of all environments.

    Raises InterpreterError, with uv's own message, where it cannot be made.
    """
    folder = root / key
    place = folder / (platform.machine() or "any")
    description = place / "environment.json"
    if (environment := _whole(description)) is not None:
        return environment
    source = kept_lock(key, lock, root=root)
    if not source.is_file():
        raise InterpreterError(
            f"environment: the files of {lock} (digest {key}) are not kept on this machine, in {folder}. To fix: start "
            "the batch again from its file, or share RINGMASTER_HOME between the machines"
        )
    with _exclusive(folder / f"{place.name}.lock") as held:
        if (environment := _whole(description)) is not None:
            return environment
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        _install(source, place / "venv", held=held)
        environment = describe(str(place / "venv" / "bin" / "python"))
        write_value(environment, description)
    return environment


def _whole(description: Path) -> InstalledEnvironment | None:
    """Returns the environment with a description; None for one that was not completed, or whose Python is gone."""
    environment = read_value(InstalledEnvironment, description)
    return environment if environment is not None and Path(environment.python).is_file() else None


@contextmanager
def _exclusive(file: Path) -> Iterator[int]:
    """Waits for a lock, and yields its descriptor."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _install(lock: Path, target: Path, *, held: int) -> None:
    """Has uv make an environment from a lock that is kept."""
    uv = uv_program()
    if uv is None:
        raise InterpreterError("environment: there is no uv, which makes it. To fix: pip install uv")
    python = (lock.parent / PYTHON_VERSION).read_text().strip()
    if lock.name == UV_LOCK:
        project = ("--project", str(lock.parent), "--python", python)
        commands = [[uv, "sync", "--quiet", "--frozen", "--no-install-project", "--no-editable", "--no-dev", *project]]
    else:
        into = ("--python", str(target / "bin" / "python"), "--allow-empty-requirements")
        commands = [
            [uv, "venv", "--quiet", "--no-project", "--python", python, str(target)],
            [uv, "pip", "sync", "--quiet", *into, lock.name],
        ]
    variables = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
    for command in commands:
        done = subprocess.run(
            command,
            cwd=lock.parent,
            env=variables | {"UV_PROJECT_ENVIRONMENT": str(target)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            pass_fds=[held],
            check=False,
        )
        if done.returncode:
            reason = _in_a_line(done.stderr.decode(errors="replace")) or f"it ended with status {done.returncode}"
            raise InterpreterError(
                f"environment: uv cannot make that of {lock.name}: {reason}. To fix: try `uv sync`, and lock again"
            )


def _in_a_line(text: str) -> str:
    return shortened("; ".join(line.strip() for line in text.splitlines() if line.strip()), MAX_MESSAGE)
