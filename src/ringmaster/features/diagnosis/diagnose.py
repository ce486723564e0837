"""Collects the bundle of `ringmaster diagnose`: versions, machine, settings, states of the pool and its runs, and logs.

Of jobs, it has names, states and times, and no contents.
"""

import configparser
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import httpx
import psutil
from sqlalchemy import Connection, Select, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from ringmaster.codec import to_json
from ringmaster.distribution import DISTRIBUTION
from ringmaster.features.diagnosis.bundle import (
    Bundle,
    BundleFile,
    Collect,
    Redactor,
    collect,
    passwords_of,
    secrets_of,
    shown_environment,
)
from ringmaster.flows import settings
from ringmaster.flows.dated_runs import runs_below
from ringmaster.flows.services.service_files import ServiceFiles, password_file
from ringmaster.flows.settings import PoolAddress
from ringmaster.model_lineage.sqlite_files import path_of
from ringmaster.tasks.planning import Plan
from ringmaster.tasks.pool.nodes import read_nodes
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import Journal, SegmentRecord, segment_record
from ringmaster.tasks.storage.schema import ABOUT, BATCHES, EXECUTOR, JOBS, LEASES, ORDERS, PLANS, REQUESTS, SEGMENTS

PATTERNS = ("pool/*.log", "nodes/*/*.log", "batches/*/*/*.log", "batches/*/*/gangs/*/*.log")
MAX_FILES = 40
MAX_BYTES = 100_000  # of each file


def diagnose(home: Path) -> Bundle:
    """Returns a description of this machine, a home and its pool, without secrets. It works with servers that are
    down.

    home: RINGMASTER_HOME.
    """
    secrets, faults = known_secrets(home)
    sources: Mapping[str, Collect] = {
        "versions": versions,
        "packages": packages,
        "machine": lambda: hardware(home),
        "gpus": nvidia,
        "settings": lambda: pool_settings(home),
        "processes": lambda: processes(home),
        "servers": servers,
        "pool": pool_rows,
        "runs": lambda: local_runs(home),
        "logs": lambda: logs(home),
    }
    bundle = collect(sources, redact=Redactor(secrets))
    if faults:
        unread = f"secrets of these files may be in the logs, as they could not be read: {', '.join(faults)}"
        bundle = replace(bundle, failures={**bundle.failures, "secrets": unread})
    return bundle


def default_file() -> Path:
    """Returns the file of a bundle without a given name, in the working folder."""
    return Path(f"ringmaster-diagnose-{datetime.now(UTC):%Y%m%d-%H%M%S}.tar.gz").absolute()


def logs(home: Path) -> Iterator[BundleFile]:
    """Yields the ends of the log files of services, nodes and ranks; of the newest ones, where there are many."""
    files = [file for pattern in PATTERNS for file in home.glob(pattern) if not file.is_symlink()]
    result = [file for file in files if file.is_file() and file.stat().st_size]
    for file in sorted(result, key=lambda file: file.stat().st_mtime)[-MAX_FILES:]:
        yield BundleFile(name=f"logs/{file.relative_to(home)}", text=_tail(file))


def _tail(file: Path) -> str:
    """Returns the last lines of a file. The first one is left out if it is not whole, as it may begin in a secret."""
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(max(0, size - MAX_BYTES))
        text = opened.read(MAX_BYTES).decode(errors="replace")
    return text if size <= MAX_BYTES else text.partition("\n")[2]


ANSWER_TIMEOUT_S = 5.0


def known_secrets(home: Path) -> tuple[list[str], list[str]]:
    """Returns the secrets of this environment and of the pool of a home; and of which files none could be read."""
    result, faults = list(secrets_of(os.environ)), []
    sources: dict[str, Callable[[], Iterator[str]]] = {
        "pool/password": lambda: _of_password_file(home / "pool"),
        "pool.json": lambda: _of_address(home),
        "pool/services.json": lambda: _of_services(home / "pool"),
        "pool/mlflow-auth.ini": lambda: _of_mlflow(home / "pool"),
    }
    for name, source in sources.items():
        try:
            result += source()
        except Exception as error:  # noqa: BLE001 - reported: whatever such a file holds, the others count
            faults.append(f"{name}: {type(error).__name__}")
    return result, faults


def pool_settings(home: Path) -> Iterator[BundleFile]:
    """Yields the settings that commands use here: the environment, and the address of the pool."""
    yield BundleFile.of_json("environment.json", shown_environment(os.environ))
    address = settings.recorded_pool()
    yield BundleFile.of_json(
        "settings.json",
        {
            "home": str(home),
            "checkpoints": settings.checkpoint_root(),
            "tensors": str(settings.tensors(home)),
            "pool": _address(address) if address is not None else None,
        },
    )


def processes(home: Path) -> Iterator[BundleFile]:
    """Yields the services of the pool, and the processes that provide them."""
    files = ServiceFiles(home / "pool")
    supervisor = files.supervisor()
    result: dict[str, Any] = {
        "fault": files.fault(),
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
    yield BundleFile.of_json("processes.json", result)


def servers() -> Iterator[BundleFile]:
    """Yields what the servers of the pool answer to a health check; none where it has ended."""
    address = settings.recorded_pool() if settings.pool_fault() is None else None
    urls = {}
    if address is not None:
        urls = {
            "prefect": f"{address.prefect_api}/health",
            "mlflow": f"{address.mlflow_uri}/health",
            "prefect version": f"{address.prefect_api}/admin/version",
            "mlflow version": f"{address.mlflow_uri}/version",
        }
        if address.metrics_url:
            urls["metrics"] = address.metrics_url.replace("/metrics", "/health")
    user = (address.username, address.password) if address is not None and address.password else None
    yield BundleFile.of_json("servers.json", {name: _answer(url, user) for name, url in urls.items()})


def _answer(url: str, user: tuple[str, str] | None) -> dict[str, Any]:
    try:
        answer = httpx.get(url, auth=user, timeout=ANSWER_TIMEOUT_S)
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
        return {"fault": "not a valid URL of a database"}
    known = {"driver": parts.drivername, "host": parts.host, "port": parts.port, "name": parts.database}
    return {**known, "user": parts.username, "has_password": parts.password is not None, "options": sorted(parts.query)}


def _of_password_file(folder: Path) -> Iterator[str]:
    if (file := password_file(folder)).exists():
        yield from file.read_text().splitlines()


def _of_address(home: Path) -> Iterator[str]:
    address = settings.recorded_pool() if settings.pool_file(home).exists() else None
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


NAMED = (DISTRIBUTION, "torch", "prefect", "mlflow", "transformers", "sqlalchemy", "psycopg", "fastapi", "nvidia-ml-py")
GPU_TIMEOUT_S = 30.0  # a driver with a fault may not answer


def versions() -> Iterator[BundleFile]:
    """Yields the versions of Ringmaster, Python and what it is built on."""
    installed = {each.name.lower(): each.version for each in distributions()}
    known = {name: installed.get(name, "not installed") for name in NAMED}
    yield BundleFile.of_json("versions.json", {"python": sys.version, "executable": sys.executable, **known})


def packages() -> Iterator[BundleFile]:
    """Yields the installed packages in the form of `pip freeze`, with where those come from that have no index."""
    lines = set()
    for each in distributions():
        origin = each.read_text("direct_url.json")
        lines.add(f"{each.name}=={each.version}" + (f"  # {origin.strip()}" if origin else ""))
    yield BundleFile(name="packages.txt", text="\n".join(sorted(lines, key=str.lower)) + "\n")


def hardware(home: Path) -> Iterator[BundleFile]:
    """Yields the operating system, cores, memory and disks of this machine. home: RINGMASTER_HOME."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    result: dict[str, Any] = {
        "system": platform.platform(),
        "os_release": platform.freedesktop_os_release().get("PRETTY_NAME", ""),
        "machine": platform.machine(),
        "cores": {"logical": psutil.cpu_count(), "physical": psutil.cpu_count(logical=False)},
        "cores_of_this_process": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "memory_bytes": {"total": memory.total, "available": memory.available, "swap": swap.total},
        "disk_bytes": {
            str(place): shutil.disk_usage(place)._asdict()
            for place in (home, Path("/tmp"), Path("/dev/shm"))  # noqa: S108 - only their free space is read
            if place.exists()
        },
        "uptime_s": round(float(Path("/proc/uptime").read_text().split()[0])),
    }
    yield BundleFile.of_json("machine.json", result)


def nvidia() -> Iterator[BundleFile]:
    """Yields what `nvidia-smi` says. Raises FileNotFoundError on a machine without it, and if it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        yield BundleFile(name="nvidia-smi.txt", text="nvidia-smi is not installed on this machine\n")
        return
    done = subprocess.run([program], capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=False)
    yield BundleFile(name="nvidia-smi.txt", text=f"exit status {done.returncode}\n{done.stdout}{done.stderr}")


DATABASE_TIMEOUT_S = 5.0
MAX_ROWS = 200
MAX_PLANS = 5
MAX_RUNS = 5


def pool_rows() -> Iterator[BundleFile]:
    """Yields the state of the pool that this machine belongs to. Raises SQLAlchemyError if its database is away."""
    address = settings.recorded_pool()
    if address is None:
        return
    file = path_of(address.database)
    if file and not Path(file).exists():  # to open it would create it
        raise FileNotFoundError(f"the pool's database {file} is not there")
    with closing(Database(address.database, timeout_s=DATABASE_TIMEOUT_S)) as database:
        yield BundleFile.of_json("pool.json", database.read(_pool))


def local_runs(home: Path) -> Iterator[BundleFile]:
    """Yields the state of the newest runs of batches that ran on this machine alone."""
    runs = runs_below(home / "batches", "*/*")[-MAX_RUNS:]
    yield BundleFile.of_json("runs.json", {str(run.relative_to(home)): _run(run / "journal.db") for run in runs})


def _run(file: Path) -> dict[str, Any]:
    with closing(Journal.of_file(file)) as journal:
        jobs = {name: [r.status, r.step, r.message] for name, r in journal.jobs().items()}
        segments = [_segment(record) for record in journal.segments()[-MAX_ROWS:]]
        return {"jobs": jobs, "segments": segments, "plans": journal.database.read(_plans)}


def _pool(connection: Connection) -> dict[str, Any]:
    def rows(query: Select[Any]) -> list[dict[str, Any]]:
        return [dict(row._mapping) for row in connection.execute(query.limit(MAX_ROWS))]

    batches = rows(_columns(BATCHES, "id", "status", "message", "submitted_s").order_by(BATCHES.c.submitted_s.desc()))
    newest = [batch["id"] for batch in batches[:MAX_RUNS]]
    jobs = _columns(JOBS, "batch", "name", "status", "step", "message").order_by(JOBS.c.number.desc())
    segments = connection.execute(select(SEGMENTS).order_by(SEGMENTS.c.id.desc()).limit(MAX_ROWS)).all()
    return {
        "about": rows(_columns(ABOUT, "key", "value")),
        "executor": rows(_columns(EXECUTOR, "epoch", "beats", "owner")),
        "nodes": [to_json(record) for record in read_nodes(connection)],
        "leases": rows(_columns(LEASES, "device", "holder", "since_s")),
        "batches": batches,
        "jobs": rows(jobs.where(JOBS.c.status.not_in(("done",)) | JOBS.c.batch.in_(newest))),
        "segments": [_segment(segment_record(row._mapping, job=f"{row.batch}/{row.job}")) for row in segments],
        "orders": rows(
            _columns(ORDERS, "segment", "node", "batch", "status", "flow_run").order_by(ORDERS.c.segment.desc())
        ),
        "requests": [_request(row) for row in rows(select(REQUESTS).order_by(REQUESTS.c.id.desc()))],
        "plans": _plans(connection),
    }


def _plans(connection: Connection) -> list[dict[str, Any]]:
    query = select(PLANS).where(PLANS.c.batch == "").order_by(PLANS.c.id.desc()).limit(MAX_PLANS)
    return [_plan(row) for row in connection.execute(query)]


def _columns(table: Any, *names: str) -> Select[Any]:
    return select(*(table.c[name] for name in names))


def _plan(row: Any) -> dict[str, Any]:
    plan = Plan.from_json(row.content["plan"])
    return {
        "made": _time(row.made_s),
        "why": row.why,
        "method": plan.method,
        "objective": plan.objective,
        "makespan_s": plan.makespan_s,
        "lower_bound_s": plan.best_bound_s,
        "gap": plan.gap,
        "planning_s": dict(plan.seconds),
        "segments": [
            {"job": s.job, "start_s": s.start_s, "end_s": s.end_s, "devices": s.devices}
            for s in plan.segments[:MAX_ROWS]
        ],
    }


def _segment(record: SegmentRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "job": record.job,
        **{
            key: getattr(record.spec, key) for key in ("technique", "num_devices", "devices", "first_step", "last_step")
        },
        "started": _time(record.started_s),
        "ended": _time(record.ended_s),
        "status": record.result.status or None,
        "message": record.result.message or None,
    }


def _request(row: dict[str, Any]) -> dict[str, Any]:
    content, answer = row["content"], row["answer"]
    batch = content.get("batch")
    return {
        "kind": row["kind"],
        "status": row["status"],
        "made": _time(row["made_s"]),
        "batch": batch.get("name") if isinstance(batch, dict) else batch,
        "node": content.get("node"),
        "answer": {key: answer.get(key) for key in ("message", "devices", "flow_run", "attempt") if key in answer},
    }


def _time(at_s: float | None) -> str | None:
    return None if at_s is None else datetime.fromtimestamp(at_s, UTC).isoformat()
