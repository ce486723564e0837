"""What the processes of a pool on this machine are: their settings, states, and whether the servers answer."""

from __future__ import annotations

import configparser
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from ringmaster.flows import settings
from ringmaster.flows.diagnosis.bundle import Part
from ringmaster.flows.diagnosis.redaction import passwords_of, secrets_of, shown_environment
from ringmaster.flows.services.files import ServiceFiles
from ringmaster.flows.services.passwords import password_file
from ringmaster.flows.settings import PoolAddress

ANSWER_PATIENCE_S = 5.0


def known_secrets(home: Path) -> tuple[list[str], list[str]]:
    """Returns the secrets of this environment and of the pool of a home; and of which files none could be read."""
    found, faults = list(secrets_of(os.environ)), []
    sources: dict[str, Callable[[], Iterator[str]]] = {
        "pool/password": lambda: _of_password_file(home / "pool"),
        "pool.json": lambda: _of_address(home),
        "pool/services.json": lambda: _of_services(home / "pool"),
        "pool/mlflow-auth.ini": lambda: _of_mlflow(home / "pool"),
    }
    for name, source in sources.items():
        try:
            found += source()
        except Exception as error:  # noqa: BLE001 - reported: whatever such a file holds, the others count
            faults.append(f"{name}: {type(error).__name__}")
    return found, faults


def pool_settings(home: Path) -> Iterator[Part]:
    """Yields the settings that commands use here: the environment, and the address of the pool."""
    yield Part.of_json("environment.json", shown_environment(os.environ))
    address = settings.pool()
    yield Part.of_json(
        "settings.json",
        {
            "home": str(home),
            "checkpoints": settings.checkpoint_root(),
            "tensors": str(settings.tensors(home)),
            "pool": _address(address) if address is not None else None,
        },
    )


def processes(home: Path) -> Iterator[Part]:
    """Yields the services of the pool, and the processes that provide them."""
    files = ServiceFiles(home / "pool")
    supervisor = files.supervisor()
    found: dict[str, Any] = {
        "supervisor": _process(supervisor.pid) if supervisor is not None else None,
        "services": [
            {
                "name": state.name,
                "status": state.status,
                "num_restarts": state.num_restarts,
                "message": state.message,
                "process": _process(state.pid) if state.pid is not None and state.lives() else None,
            }
            for state in files.states()
        ],
        "commands": {service.name: " ".join(service.command) for service in files.services()} if files.states() else {},
    }
    yield Part.of_json("processes.json", found)


def servers() -> Iterator[Part]:
    """Yields what the servers of the pool answer when they are asked whether they are up."""
    address = settings.pool()
    urls = {}
    if address is not None:
        urls = {"prefect": f"{address.prefect_api}/health", "mlflow": f"{address.mlflow_uri}/health"}
        urls |= {
            "prefect version": f"{address.prefect_api}/admin/version",
            "mlflow version": f"{address.mlflow_uri}/version",
        }
        if address.metrics_url:
            urls["metrics"] = address.metrics_url.replace("/metrics", "/health")
    user = (address.username, address.password) if address is not None and address.password else None
    yield Part.of_json("servers.json", {name: _answer(url, user) for name, url in urls.items()})


def _answer(url: str, user: tuple[str, str] | None) -> dict[str, Any]:
    try:
        answer = httpx.get(url, auth=user, timeout=ANSWER_PATIENCE_S)
    except httpx.HTTPError as error:
        return {"url": url, "error": f"{type(error).__name__}: {error}"}
    return {
        "url": url,
        "status": answer.status_code,
        "text": answer.text[:200],
        "seconds": answer.elapsed.total_seconds(),
    }


def _process(pid: int) -> dict[str, Any] | None:
    """Returns what is known of a process and its children; None if it has ended."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return {
                "pid": pid,
                "command": " ".join(process.cmdline()),
                "status": process.status(),
                "started_s": process.create_time(),
                "cpu_s": sum(process.cpu_times()[:2]),
                "memory_bytes": process.memory_info().rss,
                "num_threads": process.num_threads(),
                "num_files": process.num_fds(),
                "children": [" ".join(child.cmdline())[:300] for child in process.children(recursive=True)],
            }
    except psutil.NoSuchProcess:
        return None


def _address(address: PoolAddress) -> dict[str, Any]:
    return {
        "database": _database(address.database),
        "prefect_api": address.prefect_api,
        "mlflow_uri": address.mlflow_uri,
        "metrics_url": address.metrics_url,
        "work_pool": address.work_pool,
        "username": address.username,
        "has_password": bool(address.password),
    }


def _database(url: str) -> dict[str, Any]:
    """Returns a database's URL in parts, without its password, which may also be one of the parameters."""
    try:
        parts = make_url(url)
    except ArgumentError:
        return {"fault": "it is no URL of a database"}
    known = {"driver": parts.drivername, "host": parts.host, "port": parts.port, "name": parts.database}
    return {**known, "user": parts.username, "has_password": parts.password is not None, "options": sorted(parts.query)}


def _of_password_file(folder: Path) -> Iterator[str]:
    if (file := password_file(folder)).exists():
        yield from file.read_text().splitlines()


def _of_address(home: Path) -> Iterator[str]:
    address = settings.pool() if settings.pool_file(home).exists() else None
    if address is not None:
        yield address.password
        yield from passwords_of(address.database)


def _of_services(folder: Path) -> Iterator[str]:
    if (folder / "services.json").exists():
        for service in ServiceFiles(folder).services():
            yield from secrets_of(service.environment)


def _of_mlflow(folder: Path) -> Iterator[str]:
    if (file := folder / "mlflow-auth.ini").exists():
        parser = configparser.ConfigParser()
        parser.read(file)
        yield parser["mlflow"]["admin_password"]
