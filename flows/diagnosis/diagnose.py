"""Collects the bundle of `ringmaster diagnose`, with the ends of the newest log files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from ringmaster.flows.diagnosis import machine, pool_state, services
from ringmaster.flows.diagnosis.bundle import Bundle, Collect, Part, collect
from ringmaster.flows.diagnosis.redaction import Redactor

PATTERNS = ("pool/*.log", "nodes/*/*.log", "batches/*/*/*.log", "batches/*/*/gangs/*/*.log")
MOST_FILES = 40
MOST_BYTES = 100_000  # of each file


def diagnose(home: Path) -> Bundle:
    """Returns what can be told of this machine, a home and its pool, without secrets. It works with servers that are
    down.

    home: RINGMASTER_HOME.
    """
    secrets, faults = services.known_secrets(home)
    sources: Mapping[str, Collect] = {
        "versions": machine.versions,
        "packages": machine.packages,
        "machine": lambda: machine.machine(home),
        "gpus": machine.nvidia,
        "settings": lambda: services.pool_settings(home),
        "processes": lambda: services.processes(home),
        "servers": services.servers,
        "pool": pool_state.pool_state,
        "runs": lambda: pool_state.local_runs(home),
        "logs": lambda: logs(home),
        "secrets": lambda: _about_secrets(faults),
    }
    return collect(sources, redact=Redactor(secrets))


def default_file() -> Path:
    """Returns the file of a bundle without a given name, in the working folder."""
    return Path(f"ringmaster-diagnose-{datetime.now(UTC):%Y%m%d-%H%M%S}.tar.gz").absolute()


def _about_secrets(faults: list[str]) -> Iterator[Part]:
    """Raises RuntimeError if a file with secrets could not be read, so that they may be in the logs."""
    if faults:
        raise RuntimeError(f"secrets of these files may be in the logs, as they could not be read: {', '.join(faults)}")
    yield from ()


def logs(home: Path) -> Iterator[Part]:
    """Yields the ends of the log files of services, nodes and ranks; of the newest ones, where there are many."""
    files = [file for pattern in PATTERNS for file in home.glob(pattern) if not file.is_symlink()]
    found = [file for file in files if file.is_file() and file.stat().st_size]
    for file in sorted(found, key=lambda file: file.stat().st_mtime)[-MOST_FILES:]:
        yield Part(name=f"logs/{file.relative_to(home)}", text=_tail(file))


def _tail(file: Path) -> str:
    """Returns the last lines of a file. The first one is left out if it is not whole, as it may begin in a secret."""
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(max(0, size - MOST_BYTES))
        text = opened.read(MOST_BYTES).decode(errors="replace")
    return text if size <= MOST_BYTES else text.partition("\n")[2]
