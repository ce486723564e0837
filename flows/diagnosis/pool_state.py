"""The state of a pool and of local runs, from their databases: names, states and times, and no contents of jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Select, select

from ringmaster.codec import to_json
from ringmaster.flows import settings
from ringmaster.flows.diagnosis.bundle import Part
from ringmaster.model_lineage.sqlite_files import path_of
from ringmaster.tasks.planning import Plan
from ringmaster.tasks.pool.nodes import read_nodes
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import Journal, SegmentRecord, segment_record
from ringmaster.tasks.storage.schema import ABOUT, BATCHES, EXECUTOR, JOBS, LEASES, ORDERS, PLANS, REQUESTS, SEGMENTS

DATABASE_PATIENCE_S = 5.0
MOST_ROWS = 200
MOST_PLANS = 5
MOST_RUNS = 5


def pool_state() -> Iterator[Part]:
    """Yields the state of the pool that this machine belongs to. Raises SQLAlchemyError if its database is away."""
    address = settings.pool()
    if address is None:
        return
    file = path_of(address.database)
    if file and not Path(file).exists():  # to open it would create it
        raise FileNotFoundError(f"the pool's database {file} is not there")
    with closing(Database(address.database, patience_s=DATABASE_PATIENCE_S)) as database:
        yield Part.of_json("pool.json", database.read(_pool))


def local_runs(home: Path) -> Iterator[Part]:
    """Yields the state of the newest runs of batches that ran on this machine alone."""
    files = sorted((home / "batches").glob("*/*/journal.db"), key=lambda file: file.stat().st_mtime)
    yield Part.of_json("runs.json", {str(file.parent.relative_to(home)): _run(file) for file in files[-MOST_RUNS:]})


def _run(file: Path) -> dict[str, Any]:
    with closing(Journal.of_file(file)) as journal:
        jobs = {name: [r.status, r.step, r.message] for name, r in journal.jobs().items()}
        segments = [_segment(record) for record in journal.segments()[-MOST_ROWS:]]
        return {"jobs": jobs, "segments": segments, "plans": journal.database.read(_plans)}


def _pool(connection: Connection) -> dict[str, Any]:
    def rows(query: Select[Any]) -> list[dict[str, Any]]:
        return [dict(row._mapping) for row in connection.execute(query.limit(MOST_ROWS))]

    batches = rows(_columns(BATCHES, "id", "status", "message", "submitted_s").order_by(BATCHES.c.submitted_s.desc()))
    newest = [batch["id"] for batch in batches[:MOST_RUNS]]
    jobs = _columns(JOBS, "batch", "name", "status", "step", "message").order_by(JOBS.c.number.desc())
    segments = connection.execute(select(SEGMENTS).order_by(SEGMENTS.c.id.desc()).limit(MOST_ROWS)).all()
    return {
        "about": rows(_columns(ABOUT, "key", "value")),
        "executor": rows(_columns(EXECUTOR, "epoch", "beats", "owner")),
        "nodes": [to_json(record) for record in read_nodes(connection)],
        "leases": rows(_columns(LEASES, "device", "holder", "since_s")),
        "batches": batches,
        "jobs": rows(jobs.where(JOBS.c.status.not_in(("done",)) | JOBS.c.batch.in_(newest))),
        "segments": [_segment(segment_record(row, job=f"{row.batch}/{row.job}")) for row in segments],
        "orders": rows(
            _columns(ORDERS, "segment", "node", "batch", "status", "flow_run").order_by(ORDERS.c.segment.desc())
        ),
        "requests": [_request(row) for row in rows(select(REQUESTS).order_by(REQUESTS.c.id.desc()))],
        "plans": _plans(connection),
    }


def _plans(connection: Connection) -> list[dict[str, Any]]:
    query = select(PLANS).where(PLANS.c.batch == "").order_by(PLANS.c.id.desc()).limit(MOST_PLANS)
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
            for s in plan.segments[:MOST_ROWS]
        ],
    }


def _segment(record: SegmentRecord) -> dict[str, Any]:
    known: Sequence[str] = ("technique", "num_devices", "devices", "first_step", "last_step")
    outcome = record.outcome or {}
    return {
        "id": record.id,
        "job": record.job,
        **{key: record.what.get(key) for key in known},
        "started": _time(record.started_s),
        "ended": _time(record.ended_s),
        "status": outcome.get("status"),
        "message": outcome.get("message"),
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
