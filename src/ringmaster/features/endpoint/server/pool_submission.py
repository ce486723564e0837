"""Submits an endpoint to a pool: one job whose only step is its life, under one option that keeps its devices.

The controller places it like any job. While it waits, plans count with a gang that ends after all deadlines that the
pool has promised, or at least `idle_s`; once it runs, they have neither the job nor its devices.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select

from ringmaster.codec import finite
from ringmaster.errors import InputError, raise_faults
from ringmaster.features.endpoint.routes import public_url
from ringmaster.features.endpoint.server.endpoint_file import EndpointFile
from ringmaster.features.endpoint.server.endpoint_server import (
    POOL_FILE,
    SERVER_FILE,
    ServedEndpoint,
    alone,
    endpoint_folder,
    kept_keys,
)
from ringmaster.features.endpoint.server.pool_gang import HOME
from ringmaster.files import write_atomically
from ringmaster.flows.pool.own_node import healthy
from ringmaster.flows.settings import PoolAddress
from ringmaster.tasks.cluster import Cluster, Node
from ringmaster.tasks.pool.nodes import NodeRegistry, NodeStatus
from ringmaster.tasks.pool.submissions import Submission, Submissions
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import ENDED, JobRecord, JobStatus, Journal
from ringmaster.tasks.storage.schema import PLANS, check_release
from ringmaster.techniques import DataSpec, Job, ModelSpec, Profile
from ringmaster.techniques.profiles import PREDICTED, UNTRUSTED

TECHNIQUE = "endpoint"
STARTUP_S = 30.0
LOOK_EVERY_S = 0.5
KIND_FILE = "devices.json"


@dataclass(frozen=True, kw_only=True)
class PooledEndpoint:
    """An endpoint that was submitted.

    batch: the id of its batch in the pool.
    folder: its folder in the home, which the nodes share.
    """

    entry: EndpointFile
    batch: str
    folder: Path


def submit_endpoint(entry: EndpointFile, database: Database, *, home: Path) -> PooledEndpoint:
    """Submits an endpoint to the pool. Raises InputError, with all faults, where it cannot be served there."""
    database.read(check_release)
    folder = endpoint_folder(home.absolute(), entry.name)
    nodes = [healthy(node) for node in NodeRegistry(database).all() if node.status == NodeStatus.SERVING]
    kind = _kind(folder, nodes)
    most = max((len(node.devices) for node in nodes if Cluster(nodes=(node,)).device_kind() == kind), default=0)
    if kind is None:
        lacks = ["the pool has no trusted node with a healthy device. To fix: start a worker"]
    elif 0 < most < entry.serve.devices:
        lacks = [f"serve: devices is {entry.serve.devices}, and no node has more than {most}. To fix: fewer devices"]
    else:
        lacks = []
    raise_faults([*_faults(entry, database, folder=folder), *lacks])
    assert kind is not None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SERVER_FILE).unlink(missing_ok=True)  # of a server that was killed
    write_atomically(folder / KIND_FILE, json.dumps({"kind": kind}).encode())
    kept_keys(folder, entry.serve.owners)
    content = entry.model_dump(mode="json", exclude_none=True)
    write_atomically(folder / POOL_FILE, json.dumps(finite(content), indent=1).encode(), mode=0o600)
    batch = f"{entry.name}-{uuid.uuid4().hex[:8]}"
    held_s = max(entry.serve.idle_s, *deadlines_s(_newest_problem(database)), 0.0)
    job = endpoint_job(entry.name, home=home.absolute())
    submission = Submission(
        id=batch,
        name=entry.name,
        jobs=(job,),
        profiles={job.name: (endpoint_profile(kind=kind, num_devices=entry.serve.devices, held_s=held_s),)},
        folder=str(home.absolute() / "batches" / entry.name / batch),
        cache_dir=str(home.absolute() / "cache"),
        started_s=time.time(),
    )
    Submissions(database).submit(submission)
    return PooledEndpoint(entry=entry, batch=batch, folder=folder)


def endpoint_job(name: str, *, home: Path) -> Job:
    """Returns the job of an endpoint: its only step is its life."""
    command = ("ringmaster", "serve", str(endpoint_folder(home, name) / POOL_FILE))
    model = ModelSpec(command=command, kwargs={HOME: str(home)})
    return Job(name=name, model=model, data=DataSpec(source="command"), num_steps=1)


def endpoint_profile(*, kind: str, num_devices: int, held_s: float) -> Profile:
    """Returns the option of an endpoint.

    kind: the kind of device, as clients get other bits on another one.
    held_s: how long plans count with it while it waits for its devices.
    """
    return Profile(
        technique=TECHNIQUE,
        num_devices=num_devices,
        num_ranks=1,
        step_s=held_s,
        peak_bytes=0,
        startup_s=STARTUP_S,
        source=PREDICTED,
        device_type=kind,
        holds_devices=True,
    )


def deadlines_s(problem: Mapping[str, Any] | None) -> Sequence[float]:
    """Returns the deadlines of a stored problem, in seconds from its time 0."""
    jobs = [] if problem is None else problem.get("jobs", [])
    return [float(job["deadline"]) for job in jobs if job.get("deadline") is not None]


def _newest_problem(database: Database) -> Mapping[str, Any] | None:
    query = select(PLANS.c.content).where(PLANS.c.batch == "").order_by(PLANS.c.id.desc()).limit(1)
    newest = database.scalar(query) if Submissions(database).active() else None
    problem: Mapping[str, Any] | None = None if newest is None else newest["problem"]
    return problem


def _kind(folder: Path, nodes: Sequence[Node]) -> str | None:
    """Returns the kind of device: that of the endpoint's earlier clients, else the most frequent, GPUs first."""
    numbers: dict[tuple[bool, str], int] = {}
    for node in nodes:
        if node.devices and not (kind := Cluster(nodes=(node,)).device_kind()).endswith(UNTRUSTED):
            key = node.devices[0].kind == "gpu", kind
            numbers[key] = numbers.get(key, 0) + len(node.devices)
    file = folder / KIND_FILE
    if file.exists():
        kept: str = json.loads(file.read_text())["kind"]
        return kept
    return max(numbers, key=lambda key: (key[0], numbers[key]))[1] if numbers else None


def _faults(entry: EndpointFile, database: Database, *, folder: Path) -> Sequence[str]:
    if folder.is_dir():
        with alone(folder, entry.name):  # raises where it is served on this machine
            pass
    faults = [
        f"serve: {key} is what a node has, which the pool chooses. To fix: remove it"
        for key in ("device", "port")
        if getattr(entry.serve, key) is not None
    ]
    active = Submissions(database).active()
    names = [id for id, name, _ in Submissions(database).names() if id in active and name == entry.name]
    if names:
        faults.append(
            f"the pool has a batch or an endpoint {entry.name} already. To fix: `ringmaster jobs cancel {entry.name}`, "
            "or another name"
        )
    return faults


def wait_until_served(
    endpoint: PooledEndpoint, database: Database, *, pool: PoolAddress, notice: Callable[[str], None]
) -> ServedEndpoint:
    """Returns the endpoint once it answers. Raises InputError where it has ended before."""
    began_s, reported = time.time(), ""
    clock = threading.Event()
    while True:
        record = Journal(database, batch=endpoint.batch).jobs().get(endpoint.entry.name)
        if record is not None and record.status in ENDED:
            raise InputError([f"the endpoint {endpoint.entry.name} is {record.status}: {record.message}"])
        if record is not None and record.status == JobStatus.RUNNING and (url := url_of(endpoint.folder)) is not None:
            keys = kept_keys(endpoint.folder, endpoint.entry.serve.owners)
            return ServedEndpoint(url=public_url(pool, endpoint.entry.name) or url, keys=keys)
        if (why := _waits_for(record, database)) not in ("", reported) and time.time() - began_s > 2 * LOOK_EVERY_S:
            notice(f"{endpoint.entry.name} {why}")
            reported = why
        clock.wait(LOOK_EVERY_S)


def _waits_for(record: JobRecord | None, database: Database) -> str:
    if record is None:
        return "waits for a controller"
    if record.status == JobStatus.RUNNING:
        return "loads its bases"
    running = [each.job for each in Journal(database, batch=None).segments() if each.outcome is None]
    return f"waits for a device, which {', '.join(sorted(set(running)))} use" if running else "waits for a device"


def url_of(folder: Path) -> str | None:
    """Returns where the server of an endpoint listens now; None while there is none."""
    try:
        url: str = json.loads((folder / SERVER_FILE).read_text())["url"]
    except (OSError, ValueError, KeyError):
        return None
    return url
