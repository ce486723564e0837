"""The protocol of commands: the order in one JSON file, and the events in JSON lines.

docs/commands.md describes the protocol for authors of commands.
"""

from __future__ import annotations  # `_TYPES` knows the types of fields by their texts

import json
import math
import os
import random
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from site import getsitepackages
from typing import Any, ClassVar

from ringmaster.codec import to_json
from ringmaster.errors import CheckpointError
from ringmaster.files import sha256_of
from ringmaster.techniques.checkpoints import checkpoint
from ringmaster.techniques.checkpoints.storage import MANIFEST, LocalStorage
from ringmaster.techniques.metric import checked_values
from ringmaster.techniques.processes.gang_events import MAX_STEPS, OutcomeStatus
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.processes.rank_environment import IMPORT_ROOT, first_in_path, linked_package
from ringmaster.text import printable_lines, storable

MAX_IN_LINE = 1_000_000  # bytes of an event
MAX_IN_TEXT = 4096  # characters of a value: a path of the longest kind
KINDS = (OutcomeStatus.OUT_OF_MEMORY, OutcomeStatus.INVALID, OutcomeStatus.CRASHED)


@dataclass(frozen=True, kw_only=True)
class CommandEvent:
    """An event of a command. NAME: the value of "event" in its line."""

    NAME: ClassVar[str]


@dataclass(frozen=True, kw_only=True)
class StepEvent(CommandEvent):
    """An event about a step: so many steps are done."""

    step: int


@dataclass(frozen=True, kw_only=True)
class TrainingStarted(StepEvent):
    """The command is about to take its first step."""

    NAME = "start"


@dataclass(frozen=True, kw_only=True)
class StepDone(StepEvent):
    """A step was done, in so many seconds."""

    NAME = "step"
    seconds: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten(StepEvent):
    """A checkpoint lies in a folder."""

    NAME = "checkpoint"
    folder: str
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class CommandEvaluation(StepEvent):
    """The model was evaluated."""

    NAME = "metrics"
    metrics: Mapping[str, Any]
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelWritten(CommandEvent):
    """The finished model was exported."""

    NAME = "model"
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class PeakMemory(CommandEvent):
    """The largest memory that the command has used on a device."""

    NAME = "memory"
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class PhaseBegun(CommandEvent):
    """A phase has begun in which the command may be silent for `patience_s` seconds."""

    NAME = "phase"
    phase: str
    patience_s: float


@dataclass(frozen=True, kw_only=True)
class CommandHeartbeat(CommandEvent):
    """The command is alive."""

    NAME = "beat"


@dataclass(frozen=True, kw_only=True)
class CommandFinished(StepEvent):
    """The command has done all steps that it was ordered."""

    NAME = "done"


@dataclass(frozen=True, kw_only=True)
class CommandStopped(StepEvent):
    """The command has stopped on request."""

    NAME = "preempted"


@dataclass(frozen=True, kw_only=True)
class CommandFailure(CommandEvent):
    """The command has failed. kind: one of `KINDS`, by default "crashed"."""

    NAME = "failed"
    message: str
    kind: str = OutcomeStatus.CRASHED


_CLASSES: Mapping[str, type[CommandEvent]] = {
    cls.NAME: cls
    for cls in (
        *(
            TrainingStarted,
            StepDone,
            CheckpointWritten,
            CommandEvaluation,
            ModelWritten,
            PeakMemory,
            PhaseBegun,
            CommandHeartbeat,
        ),
        *(CommandFinished, CommandStopped, CommandFailure),
    )
}
_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "float | None": (int, float),
    "str": (str,),
    "Mapping[str, Any]": (dict,),
}


def parse_event(line: bytes) -> CommandEvent:
    """Returns the event in a line. Raises ValueError, with the allowed events, on any other line."""
    text = line.decode(errors="replace")
    if len(line) > MAX_IN_LINE:
        raise ValueError(f"the command sent {text[:200]!r} and more, {len(line)} bytes. To fix: at most {MAX_IN_LINE}")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the command sent {text[:200]!r}, which is not JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("event"), str) or content["event"] not in _CLASSES:
        raise ValueError(f"the command sent {text[:200]!r}. To fix: give `event` one of {', '.join(_CLASSES)}")
    cls = _CLASSES[content["event"]]
    values = {}
    for each in fields(cls):
        is_needed = each.default is MISSING
        if is_needed and each.name not in content:
            raise ValueError(f"the command sent {text[:200]!r} without {each.name!r}. To fix: send it too")
        if is_needed or content.get(each.name) is not None:
            try:
                values[each.name] = _checked(each.name, content[each.name], _TYPES[str(each.type)], cls)
            except ValueError as error:
                raise ValueError(f"the command sent {text[:200]!r}, where {error}") from error
    return cls(**values)


def _checked(name: str, value: Any, types: tuple[type, ...], cls: type[CommandEvent]) -> Any:
    """Returns a field's value as an event of that class has it."""
    if not isinstance(value, types) or isinstance(value, bool):
        expected = " or ".join(each.__name__ for each in types)
        article = "an" if expected.startswith("int") else "a"
        raise ValueError(f"{name!r} is not {article} {expected}. To fix: make it one")
    if isinstance(value, dict):
        return checked_values(value, may_be_undefined=False)
    if isinstance(value, str):
        return printable_lines(value) if cls is CommandFailure else _plain_text(name, value)
    number: Any = value
    if name == "loss":  # one that is not finite has a remedy of its own
        return math.inf if isinstance(number, int) and abs(number) > MAX_STEPS else float(number)
    if not 0 <= number <= MAX_STEPS:  # nor NaN
        raise ValueError(f"{name!r} is not a number from 0 to {MAX_STEPS}. To fix: make it one")
    return number


def _plain_text(name: str, value: str) -> str:
    if len(value) > MAX_IN_TEXT:
        raise ValueError(f"{name!r} has {len(value)} characters. To fix: at most {MAX_IN_TEXT}")
    if storable(value) != value or any(ord(character) < ord(" ") for character in value):
        raise ValueError(f"{name!r} has control characters, or halves of surrogate pairs. To fix: leave them out")
    return value


INCOMING = "incoming"


def incoming(root: Path) -> Path:
    """Creates an empty folder on the same file system for the command to write into."""
    folder = root / INCOMING
    shutil.rmtree(folder, ignore_errors=True)  # left by a command that died
    folder.mkdir(parents=True)
    return folder


def adopt(root: Path, folder: Path, *, step: int, meta: Mapping[str, Any], keep: int = 2) -> Path:
    """Makes the files that a command wrote into `folder` the checkpoint of `step` under `root`, and removes old ones.

    Raises ValueError where the folder is not below the one from `incoming`, CheckpointError where the disk fails.
    """
    if not folder.is_dir() or not folder.resolve().is_relative_to((root / INCOMING).resolve()):
        raise ValueError(
            f"the command named {folder} as its checkpoint of step {step}. To fix: write it into a folder below save_to"
        )
    place, name = LocalStorage(root), checkpoint.folder_of(step)
    try:
        with checkpoint.publish(root / name) as aside:
            aside.rmdir()
            folder.rename(aside)
            files = {
                path.relative_to(aside).as_posix(): checkpoint.CheckpointFile(
                    num_bytes=path.stat().st_size, sha256=sha256_of(path)
                )
                for path in sorted(aside.rglob("*"))
                if path.is_file() and path.name != MANIFEST
            }
            if not files:
                raise ValueError(
                    f"the command's checkpoint of step {step} is empty. To fix: report it when the files are there"
                )
            manifest = checkpoint.CheckpointManifest(step=step, files=files, meta=meta)
            (aside / MANIFEST).write_bytes(checkpoint.stored_manifest(manifest))
        checkpoint.retain(place, name, keep=keep)
    except OSError as error:
        raise CheckpointError(f"checkpoint {name} could not be stored under {root}: {error}") from error
    return root / name


VERSION = 1
ORDER, REPORT = "RINGMASTER_ORDER", "RINGMASTER_REPORT"  # environment variables with the paths of the two files
RUN = "run"
PORTS = range(20_000, 32_000)  # below the ports that Linux assigns to connections


def write_order(
    file: Path,
    order: GangOrder,
    *,
    mode: str,
    port: int,
    first_step: int,
    restore_from: Path | None,
    folders: Mapping[str, Path],
) -> None:
    """Writes the order file of a command.

    port: a free port for the rendezvous of the command's processes.
    folders: `save_to` and `export_to`.
    """
    content = {
        "protocol": VERSION,
        "mode": mode,
        "job": to_json(order.job),
        "config": to_json(order.config),
        "devices": [
            {"kind": slot.kind, "index": slot.index, "uuid": slot.uuid, "cores": list(slot.cores)}
            for slot in order.slots
        ],
        "rendezvous": {"address": "127.0.0.1", "port": port},
        "first_step": first_step,
        "last_step": order.last_step if mode == RUN else None,
        "num_steps": order.job.num_steps,
        "checkpoint_every_s": order.checkpoint_every_s,
        "restore_from": None if restore_from is None else str(restore_from),
        "weights_from": order.weights_from,
        "data": to_json(order.data),
        **{name: str(folder.resolve()) for name, folder in folders.items()},
    }
    file.write_text(json.dumps(content, indent=1))


def free_port() -> int:
    """Returns a port of this machine on which nothing listens.

    Linux assigns none of these ports to connections, so that it stays free until the command listens. Raises OSError
    where no port is free.
    """
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port of {PORTS.start} to {PORTS.stop} is free")


def words_of(order: GangOrder, *, port: int) -> list[str]:
    """Returns the words of the command, with the placeholders in braces replaced."""
    assert order.job.model.command is not None
    python = order.job.interpreter(order.cache_dir) or sys.executable
    values = {"num_devices": str(len(order.slots)), "port": str(port), "python": python}
    return [
        re.sub(r"\{(num_devices|port|python)\}", lambda match: values[match[1]], word)
        for word in order.job.model.command
    ]


def environment(order: GangOrder, *, port: int, order_file: Path, report_file: Path) -> dict[str, str]:
    """Returns this process's environment without what only workers need, and with only the devices of the gang."""
    adoption = [str(Path(__file__).absolute().parent / "adoption")] if order.job.model.adopt else []
    # A command may have an interpreter of its own, which our packages must not reach: where Ringmaster is installed,
    # it has Ringmaster if it has it installed. The folder of a checkout has nothing else.
    installed = [path for path in getsitepackages() if (Path(path) / "ringmaster").is_dir()]
    python = order.job.interpreter(order.cache_dir)
    root = IMPORT_ROOT if python is None else linked_package(order_file.parent)
    paths = [str(root), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    paths = [*adoption, *(path for path in dict.fromkeys(paths) if path and path not in installed)]
    cores = {core for slot in order.slots for core in slot.cores}
    gpus = [slot.uuid or str(slot.index) for slot in order.slots if slot.kind == "gpu"]
    variables = {
        **os.environ,
        ORDER: str(order_file),
        REPORT: str(report_file),
        # The job's interpreter, and the torchrun next to it, come before any other.
        "PATH": first_in_path(python or sys.executable),
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "OMP_NUM_THREADS": str(max(len(cores) // len(order.slots), 1)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # Seconds that torchrun gives its workers to write a checkpoint before it kills them.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600"),
    }
    if not paths:
        del variables["PYTHONPATH"]
    # Set for the services of a pool. With it, `python train.py` would not find helper.py next to train.py.
    variables.pop("PYTHONSAFEPATH", None)
    return variables


class Report:
    """The named pipe for the command's events, one JSON object per line; any process of the command may open it."""

    def __init__(self, file: Path) -> None:
        file.unlink(missing_ok=True)
        os.mkfifo(file)
        # Opened for writing too, so that reading never hits the end while no other process has it open.
        self._fd = os.open(file, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._pending = b""

    def fileno(self) -> int:
        """Returns the file descriptor, for selectors."""
        return self._fd

    def events(self) -> Iterator[CommandEvent]:
        """Yields the events since the last call. Raises ValueError on a line that violates the protocol."""
        while len(self._pending) <= MAX_IN_LINE:
            try:
                self._pending += os.read(self._fd, 65536)
            except BlockingIOError:
                break
        *lines, self._pending = self._pending.split(b"\n")
        for line in lines:
            if line.strip():
                yield parse_event(line)
        if len(self._pending) > MAX_IN_LINE:
            yield parse_event(self._pending)

    def close(self) -> None:
        """Closes this end of the pipe."""
        os.close(self._fd)
