"""`environment` of jobs in batch files: the files of locks are kept, and Pythons are asked for their packages."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringmaster.errors import InterpreterError
from ringmaster.features.environment.installation import describe, uv_program
from ringmaster.features.environment.job import EnvironmentSpec, environments_folder
from ringmaster.features.environment.lock_files import PYTHON_VERSION, files_of, kept, kept_lock
from ringmaster.files import is_file, path_in
from ringmaster.findings import Finding, as_mapping
from ringmaster.tasks.batch.file_hooks import BatchFileHook

OWN_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
KEY = EnvironmentSpec.key


class EnvironmentsInFiles(BatchFileHook):
    """The key `environment` of jobs."""

    def expanded(self, entry: Any, *, folder: Path) -> tuple[Any, Sequence[Finding]]:
        """Returns the entry of a job with absolute paths of its environment, and what is wrong with them."""
        given = as_mapping(as_mapping(entry).get(KEY))
        lock, python = given.get("lock"), given.get("python")
        if not (lock or python) or not all(isinstance(each, str | None) for each in (lock, python)):
            return entry, ()  # the schema says what is wrong
        try:
            located = _of_lock(folder, lock, python=python) if lock else {"python": _path_of(folder, str(python))}
        except (ValueError, InterpreterError) as error:
            what, _, remedy = str(error).removeprefix("environment: ").partition(". To fix: ")
            return entry, [Finding((KEY, "lock" if lock else "python"), what, remedy)]
        return {**entry, KEY: {**given, **located}}, ()

    def job_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns the values of a job with the digest of its environment, the files of which are kept."""
        given = as_mapping(fields.get(KEY))
        if not given or given.get("digest"):
            return fields
        python = given["python"]
        if not (lock := given.get("lock")):
            return {**fields, KEY: {"python": python, "digest": describe(python).digest}}
        key = kept(Path(lock), python=python, root=environments_folder())
        return {**fields, KEY: {"lock": Path(lock).name, "python": python, "digest": key}}

    def entry_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns the values of a job's entry: its lock is the one that is kept."""
        given: Mapping[str, Any] = as_mapping(fields.get(KEY))
        if not given.get("digest"):
            return fields
        own = {"python": given["python"]}
        if lock := given.get("lock"):
            own["lock"] = str(kept_lock(given["digest"], lock, root=environments_folder()))
        return {**fields, KEY: own}


def _of_lock(folder: Path, lock: str, *, python: str | None) -> dict[str, str]:
    """Returns the paths of a lock, and the Python that uv is asked for. Raises ValueError where it is none."""
    if not is_file(folder, lock):
        raise ValueError(f"there is no file {lock!r}. To fix: put it into {folder}, or give its whole path")
    if uv_program() is None:
        raise ValueError("uv, which makes environments, is not installed. To fix: pip install uv")
    path = path_in(folder, lock)
    files_of(path)
    version = path.parent / PYTHON_VERSION
    return {"lock": str(path), "python": python or (version.read_text().strip() if version.is_file() else OWN_VERSION)}


def _path_of(folder: Path, python: str) -> str:
    """Returns the path of a Python. Raises ValueError or InterpreterError where there is none that runs."""
    path = str(path_in(folder, python)) if is_file(folder, python) else shutil.which(python)
    if path is None:
        raise ValueError(f"there is no Python {python!r}. To fix: give the path of one, such as venv/bin/python")
    return describe(path).python


BATCH_FILE_HOOKS = (EnvironmentsInFiles(),)
