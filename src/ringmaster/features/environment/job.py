"""`environment` of a job: the Python in which it is profiled, trained and evaluated."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ringmaster.codec import to_json
from ringmaster.errors import InterpreterError
from ringmaster.findings import Finding, Raw
from ringmaster.techniques.job_features import Description, Effect, JobFeature

if TYPE_CHECKING:
    from ringmaster.features.environment.installation import InstalledEnvironment

FOLDER = "environments"
"""The folder of environments, in the folder of what can be made again."""
RESULT = "environment"
"""The key in the result of a segment."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec(JobFeature):
    """The Python that runs a job, made by uv from a lock, or one that exists.

    Attributes:
        lock: the lock's file; its name alone once a batch has read it, and kept what it defines.
        python: the Python by its path; with a lock, the one that uv is asked for.
        digest: of the files that define it or, without a lock, of the versions of its packages.
    """

    key = "environment"
    description = "the Python of the job, such as {lock: uv.lock} or {python: /opt/old/bin/python}"
    effects = Effect.WEIGHTS | Effect.STEP | Effect.TIME | Effect.MODEL
    group_obstacle = "runs in an environment of its own"
    is_for_training: ClassVar[bool] = False
    runs_elsewhere: ClassVar[bool] = True

    lock: Annotated[
        str | None,
        Description("a lock file: uv.lock with its pyproject.toml beside it, a pylock.toml, or a requirements.txt"),
    ] = None
    python: Annotated[
        str | None,
        Description("the path of a Python; beside a lock its version, such as '3.12', Ringmaster's if left out"),
    ] = None
    digest: str | None = None

    @classmethod
    def findings(cls, job: Raw) -> Iterator[Finding]:
        """Yields a fault where neither a lock nor a Python is given."""
        value = job.get(cls.key)
        if isinstance(value, Mapping) and not (value.get("lock") or value.get("python")):
            yield Finding(
                (cls.key,), "names no Python", "give a lock, such as {lock: uv.lock}, or the path of a python"
            )

    def installed(self, cache_dir: Path) -> InstalledEnvironment:
        """Returns the `InstalledEnvironment`, made where it is not there yet.

        Raises InterpreterError where it cannot be made, or has changed since the batch was read.
        """
        from ringmaster.features.environment import installation

        if self.lock is not None:
            assert self.digest is not None, "a batch keeps the files of a lock"
            roots = (cache_dir / FOLDER, environments_folder())  # a reproduction has a cache of its own
            root = next((each for each in roots if (each / self.digest).is_dir()), roots[0])
            return installation.made(self.digest, lock=self.lock, root=root)
        assert self.python is not None
        environment = installation.describe(self.python)
        if self.digest not in (None, environment.digest):
            raise InterpreterError(
                f"environment: the packages of {self.python} have changed since the batch was read. To fix: start the "
                "batch again, under another name if it is to be trained afresh"
            )
        return environment

    def interpreter(self, job: Any, *, cache_dir: Path) -> str | None:
        """Returns the Python. Raises InterpreterError where it cannot be made, or lacks what training needs."""
        environment = self.installed(cache_dir)
        if not job.is_black_box and (lacking := environment.lacking()):
            raise InterpreterError(
                f"environment: {self.lock or self.python} cannot train: Ringmaster needs {', '.join(lacking)}. "
                "To fix: add these there, or train by a command"
            )
        return environment.python

    def segment_result(self, *, cache_dir: Path) -> Mapping[str, Any]:
        """Returns the digest, the version of Python, and the versions of the packages."""
        environment = self.installed(cache_dir)
        content = {
            "digest": self.digest or environment.digest,
            "python": environment.version,
            "packages": to_json(environment.packages),
        }
        return {RESULT: content}


def environments_folder() -> Path:
    """Returns the folder of all environments, in RINGMASTER_HOME."""
    return Path(os.environ.get("RINGMASTER_HOME") or ".ringmaster").absolute() / "cache" / FOLDER


JOB_FEATURES = (EnvironmentSpec,)
