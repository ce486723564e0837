"""Collects the bundle of `ringmaster diagnose`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from ringmaster.flows.diagnosis import machine, pool_state, services
from ringmaster.flows.diagnosis.bundle import Bundle, Collect, Part, collect
from ringmaster.flows.diagnosis.logs import logs
from ringmaster.flows.diagnosis.redaction import Redactor


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
