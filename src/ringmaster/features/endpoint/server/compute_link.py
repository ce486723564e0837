"""The processes of an endpoint: one that computes for each base, started again where it has died; one that records."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from ringmaster.errors import RingmasterError
from ringmaster.techniques.processes.rank_environment import IMPORT_ROOT

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
PROCESS = "ringmaster.features.endpoint.compute.process"
RECORDING = "ringmaster.features.endpoint.server.recording"
ENDPOINT = "ringmaster.features.endpoint.compute.endpoint:Endpoint"


def child_environment() -> dict[str, str]:
    """Returns the environment of a child process that finds what this process finds, from the same import root."""
    paths = [*(path for path in sys.path if path), str(IMPORT_ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


class ComputeProcessDied(RingmasterError):
    """The process has ended in the middle of a call. What it has stored is on disk."""


class CallFailed(RingmasterError):
    """A call was answered with an error; the process goes on."""


@dataclass(frozen=True, kw_only=True)
class ComputeSettings:
    """What a process is started with.

    base: the folder or name of the base, as batch files name it.
    limits: the fields of `EndpointLimits`.
    folder: where the clients' states are.
    cores: the processor's cores that it uses; empty for those of the server.
    precision: of the base, "fp32" or "bf16".
    endpoint: the dotted name of what computes.
    """

    base: str
    limits: Mapping[str, Any]
    folder: Path
    device: str = "cpu"
    cores: tuple[int, ...] = ()
    precision: str = "fp32"
    endpoint: str = ENDPOINT


class ComputeLink:
    """Calls to the process. One thread uses it.

    own_session: Ctrl-C at a terminal reaches the server alone, which then ends the process. Without, the process is in
        the server's process group, with which the ranks of a pool's node are killed.
    """

    own_session: ClassVar[bool] = True

    def __init__(self, settings: ComputeSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[str] | None = None
        self._starting, self._was_killed = threading.Lock(), False

    @property
    def pid(self) -> int | None:
        """The id of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the process, and returns once the base is loaded.

        Raises CallFailed where it cannot be, and ComputeProcessDied where the process ends before, or was killed.
        """
        self.close()
        self._settings.folder.mkdir(parents=True, exist_ok=True)
        with self._starting:
            if self._was_killed:
                raise ComputeProcessDied("the process that computes was killed before its start")
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", PROCESS],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                # Threads that wait for each other would else spin: on a busy machine, a hundred times as long.
                env={"OMP_WAIT_POLICY": "PASSIVE", **child_environment()},
                start_new_session=self.own_session,
            )
        self._exchange({**asdict(self._settings), "folder": str(self._settings.folder)})

    def call(self, name: str, /, **values: Any) -> Any:
        """Returns the answer to a call. Raises ComputeProcessDied, or CallFailed with the reason."""
        if self._process is None:
            raise ComputeProcessDied("the process that computes has ended")
        return self._exchange({"call": name, **values})

    def _exchange(self, value: Mapping[str, Any]) -> Any:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        line = ""
        with suppress(OSError):
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line.endswith("\n"):
            status = self._process.wait()
            self.close()
            raise ComputeProcessDied(f"the process that computes has ended with status {status}")
        answer = json.loads(line)
        if "lost" in answer:
            self.close()
            raise ComputeProcessDied(f"the process that computes has ended: {answer['lost']}")
        if "error" in answer:
            raise CallFailed(answer["error"])
        return answer["answer"]

    def kill(self) -> None:
        """Kills the process for good, from any thread; a call or start that waits then raises ComputeProcessDied."""
        with self._starting:
            self._was_killed = True
            if (process := self._process) is not None:
                process.kill()

    def close(self) -> None:
        """Ends the process by the end of its stdin, or else by a signal."""
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()
        try:
            process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class RecordingProcess:
    """Records the clients of an endpoint that have ended (`recording`), one process at a time.

    file: of the endpoint.
    own_session: as of `ComputeLink`.
    """

    def __init__(self, file: Path, *, own_session: bool = True) -> None:
        self._own_session = own_session
        self._command = [sys.executable, "-P", "-m", RECORDING, str(file.absolute())]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> bool:
        """Starts to record; returns False where that is being done, of the clients that had ended when it began."""
        if self._process is not None and self._process.poll() is None:
            return False
        self._process = subprocess.Popen(self._command, env=child_environment(), start_new_session=self._own_session)
        return True

    def wait(self) -> None:
        """Waits until what was begun is recorded."""
        if self._process is not None:
            self._process.wait()
