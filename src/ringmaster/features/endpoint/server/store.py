"""What an endpoint remembers: sessions, clients, requests with their answers, and checkpoints, in a SQLite file.

A request is stored before it is accepted, and its answer before a client gets it: a request that comes again, after
a lost connection or a restarted server, is answered from here.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from ringmaster.features.endpoint.server.store_schema import make_tables

UNEXPIRED = "(expires_s IS NULL OR expires_s > ?)"
KEPT_ANSWERS = 1000  # of a client, also of each one that shares a sampler: the newest ones
SEQS_OF_CLIENT = 1_000_000_000  # clients that share a sampler number their requests from a multiple of this each


class EndpointRequestKind(StrEnum):
    """What is computed for a request."""

    CREATE = "create"
    LOSS = "loss"
    STEP = "step"
    SAVE = "save"
    LOAD = "load"
    SAMPLE = "sample"


class RequestState(StrEnum):
    """How far a request is."""

    WAITING = "waiting"
    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"
    """Its message was refused: a corrected one may take its place, and the next request does not wait for it."""


@dataclass(frozen=True, kw_only=True)
class StoredRequest:
    """A request of a client.

    stream: the training client or the sampler whose requests are ordered by `seq`.
    model: the training client whose device time it is; None for samples of a base.
    work: what is computed, as plain values.
    step_before: the steps of the client when its optimizer step was begun; None before that.
    """

    id: str
    owner: str
    stream: str
    base: str
    seq: int
    kind: EndpointRequestKind
    work: Mapping[str, Any]
    model: str | None = None
    state: RequestState = RequestState.WAITING
    step_before: int | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingClient:
    """An adapter that a client program trains.

    spec: the fields of its `AdapterSpec`.
    losses: the losses that it has asked for.
    device_s, num_tokens: what it has used of the devices.
    active_s: when it made its last request, in seconds since the epoch.
    """

    id: str
    owner: str
    session: str
    base: str
    name: str
    spec: Mapping[str, Any]
    step: int
    losses: tuple[str, ...]
    device_s: float
    num_tokens: int
    created_s: float
    active_s: float
    is_ended: bool


@dataclass(frozen=True, kw_only=True)
class ClientCheckpoint:
    """A checkpoint of a client, by its address.

    is_snapshot: whether it has no name that a client gave. is_public: whether all owners may read it.
    metadata: what the client noted about it. num_bytes: of its files; None where an earlier release saved it.
    """

    uri: str
    owner: str
    model: str
    base: str
    folder: Path
    spec: Mapping[str, Any]
    step: int
    created_s: float
    expires_s: float | None
    is_snapshot: bool
    is_public: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    num_bytes: int | None = None

    @property
    def kind(self) -> str:
        """Such as "weights"."""
        return self.uri.rpartition("/")[0].rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class StoredSampler:
    """What a client samples from: a checkpoint, or the base alone."""

    id: str
    owner: str
    session: str
    base: str
    checkpoint: str | None


OF_SESSIONS = ("clients", "samplers")
"""The tables whose rows belong to a session."""


def digest_of(work: Mapping[str, Any]) -> str:
    """Returns what tells whether two requests ask for the same."""
    return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()


class EndpointStore:
    """The SQLite file of an endpoint. Its methods may be called from any thread.

    is_shared: whether processes of other machines read the file, which share no memory as a WAL needs.
    """

    def __init__(self, file: Path, *, is_shared: bool = False) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._connection = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
        self._connection.row_factory = sqlite3.Row
        self._connection.execute(f"PRAGMA journal_mode={'TRUNCATE' if is_shared else 'WAL'}")
        self._connection.execute("PRAGMA synchronous=FULL")  # an answer that was given outlives a power failure
        make_tables(self._connection)

    def drop_ended(self) -> None:
        """Drops the answers of sessions that have finished, when a server starts: nobody asks for them any more."""
        finished = "SELECT id FROM sessions WHERE is_finished"
        streams = " UNION ".join(f"SELECT id FROM {table} WHERE session IN ({finished})" for table in OF_SESSIONS)  # noqa: S608
        with self.changes() as db:
            db.execute(f"DELETE FROM requests WHERE state != 'waiting' AND stream IN ({streams})")  # noqa: S608
            db.execute(f"DELETE FROM samplers WHERE session IN ({finished})")  # noqa: S608

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def changes(self) -> Iterator[sqlite3.Connection]:
        """Writes what is changed inside the context at once or, after an error, not at all."""
        with self._lock:
            if self._connection.in_transaction:
                yield self._connection
                return
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def _rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock:
            return self._connection.execute(sql, values).fetchall()

    # Sessions and samplers.

    def add_session(self, id: str, *, owner: str, name: str, metadata: Mapping[str, Any]) -> None:
        """Adds a session."""
        with self.changes() as db:
            sql = "INSERT INTO sessions (id, owner, name, metadata, created_s) VALUES (?, ?, ?, ?, ?)"
            db.execute(sql, (id, owner, name, json.dumps(metadata), time.time()))

    def session(self, id: str, *, owner: str) -> sqlite3.Row | None:
        """Returns a session of an owner; None where there is no such one."""
        rows = self._rows("SELECT * FROM sessions WHERE id = ? AND owner = ?", id, owner)
        return rows[0] if rows else None

    def num_sessions(self, owner: str) -> int:
        """Returns how many sessions of an owner have not finished."""
        return int(self._rows("SELECT COUNT(*) FROM sessions WHERE owner = ? AND NOT is_finished", owner)[0][0])

    def sessions(self, owner: str, *, limit: int, offset: int) -> list[str]:
        """Returns the sessions of an owner, the newest first."""
        sql = "SELECT id FROM sessions WHERE owner = ? ORDER BY rowid DESC LIMIT ? OFFSET ?"
        return [row["id"] for row in self._rows(sql, owner, limit, offset)]

    def samplers_of(self, session: str) -> list[str]:
        """Returns the samplers of a session."""
        return [row["id"] for row in self._rows("SELECT id FROM samplers WHERE session = ? ORDER BY rowid", session)]

    def open_sessions(self) -> list[str]:
        """Returns the sessions that have not finished."""
        return [row["id"] for row in self._rows("SELECT id FROM sessions WHERE NOT is_finished")]

    def finish_session(self, id: str) -> None:
        """Notes that a session takes no more requests."""
        with self.changes() as db:
            db.execute("UPDATE sessions SET is_finished = 1 WHERE id = ?", (id,))

    def add_sampler(self, sampler: StoredSampler) -> None:
        """Adds a sampler, unless it is there."""
        with self.changes() as db:
            sql = "INSERT OR IGNORE INTO samplers (id, owner, session, base, checkpoint) VALUES (?, ?, ?, ?, ?)"
            db.execute(sql, (sampler.id, sampler.owner, sampler.session, sampler.base, sampler.checkpoint))

    def sampler(self, id: str, *, owner: str) -> StoredSampler | None:
        """Returns a sampler of an owner."""
        rows = self._rows(
            "SELECT id, owner, session, base, checkpoint FROM samplers WHERE id = ? AND owner = ?", id, owner
        )
        return StoredSampler(**dict(rows[0])) if rows else None

    def join_sampler(self, id: str) -> int:
        """Returns a number that no other client of a sampler has; the first one is 1."""
        with self.changes() as db:
            db.execute("UPDATE samplers SET num_joined = num_joined + 1 WHERE id = ?", (id,))
            return int(db.execute("SELECT num_joined FROM samplers WHERE id = ?", (id,)).fetchone()[0])

    # Training clients.

    def add_client(
        self, id: str, *, owner: str, session: str, base: str, name: str, spec: Mapping[str, Any], step: int = 0
    ) -> None:
        """Adds a training client, unless it is there."""
        now_s = time.time()
        with self.changes() as db:
            sql = (
                "INSERT OR IGNORE INTO clients (id, owner, session, base, name, spec, step, created_s, active_s) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
            )
            db.execute(sql, (id, owner, session, base, name, json.dumps(spec), step, now_s, now_s))

    def client(self, id: str) -> TrainingClient | None:
        """Returns a training client."""
        return next(iter(self.clients(where="id = ?", values=(id,))), None)

    def clients(self, *, where: str = "NOT is_ended", values: Sequence[Any] = ()) -> list[TrainingClient]:
        """Returns training clients by a condition: those that have not ended."""
        rows = self._rows(f"SELECT * FROM clients WHERE {where} ORDER BY created_s", *values)  # noqa: S608 - ours
        return [_client(row) for row in rows]

    def end_client(self, id: str) -> None:
        """Notes that a client takes no more requests."""
        with self.changes() as db:
            db.execute("UPDATE clients SET is_ended = 1 WHERE id = ?", (id,))

    def note_recorded(self, id: str) -> None:
        """Notes that the lineage has a client's last checkpoint."""
        with self.changes() as db:
            db.execute("UPDATE clients SET is_recorded = 1 WHERE id = ?", (id,))

    def note_use(self, id: str, *, device_s: float, num_tokens: int, loss: str | None) -> None:
        """Adds what a client has used of the devices, and a loss that it has asked for."""
        with self.changes() as db:
            row = db.execute("SELECT losses FROM clients WHERE id = ?", (id,)).fetchone()
            if row is None:
                return
            losses = json.loads(row["losses"])
            losses = losses if loss is None or loss in losses else [*losses, loss]
            sql = (
                "UPDATE clients SET device_s = device_s + ?, num_tokens = num_tokens + ?, losses = ?, active_s = ? "
                "WHERE id = ?"
            )
            db.execute(sql, (device_s, num_tokens, json.dumps(losses), time.time(), id))

    def set_step(self, id: str, step: int) -> None:
        """Notes how many optimizer steps a client has done."""
        with self.changes() as db:
            db.execute("UPDATE clients SET step = ?, active_s = ? WHERE id = ?", (step, time.time(), id))

    # Requests.

    def add(self, request: StoredRequest) -> None:
        """Stores a request that waits or was refused."""
        with self.changes() as db:
            sql = (
                "INSERT OR REPLACE INTO requests (id, owner, stream, model, base, seq, kind, digest, work, state) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
            )
            db.execute(
                sql,
                (
                    *(request.id, request.owner, request.stream, request.model, request.base, request.seq),
                    *(request.kind, digest_of(request.work), json.dumps(request.work), request.state),
                ),
            )

    def digest(self, id: str) -> str | None:
        """Returns the digest of an accepted request; None where there is none of that id."""
        rows = self._rows("SELECT digest FROM requests WHERE id = ? AND state != ?", id, RequestState.REFUSED)
        return rows[0]["digest"] if rows else None

    def request(self, id: str, *, owner: str) -> tuple[StoredRequest, dict[str, Any] | None] | None:
        """Returns a request of an owner and its answer; None where there is no such one."""
        rows = self._rows("SELECT * FROM requests WHERE id = ? AND owner = ?", id, owner)
        return (_request(rows[0]), rows[0]["answer"] and json.loads(rows[0]["answer"])) if rows else None

    def requests(self, base: str, state: RequestState) -> list[StoredRequest]:
        """Returns the requests to a base in a state, in order."""
        sql = "SELECT * FROM requests WHERE base = ? AND state = ? ORDER BY stream, seq"
        return [_request(row) for row in self._rows(sql, base, state)]

    def first_seqs(self, base: str) -> dict[str, int]:
        """Returns the number of the next request of each stream of a base."""
        sql = "SELECT stream, MAX(seq) AS seq FROM requests WHERE base = ? AND state IN (?, ?) GROUP BY stream"
        rows = self._rows(sql, base, RequestState.DONE, RequestState.FAILED)
        return {row["stream"]: row["seq"] + 1 for row in rows}

    def pending_gradients(self, base: str) -> list[StoredRequest]:
        """Returns the answered losses of live clients whose gradients no optimizer step has used yet, in order."""
        sql = (
            "SELECT requests.* FROM requests JOIN clients ON clients.id = requests.stream WHERE requests.base = ? "
            "AND kind = 'loss' AND state = 'done' AND work IS NOT NULL AND NOT is_ended ORDER BY stream, seq"
        )
        return [each for row in self._rows(sql, base) if (each := _request(row)).work["with_gradients"]]

    def pending_bytes(self, stream: str) -> int:
        """Returns the size of the answered losses of a client whose gradients no optimizer step has used yet."""
        sql = "SELECT SUM(LENGTH(work)) FROM requests WHERE stream = ? AND kind = 'loss' AND state = 'done'"
        return int(self._rows(sql, stream)[0][0] or 0)

    def num_refused(self, stream: str) -> int:
        """Returns how many refused messages of a client are noted."""
        return int(self._rows("SELECT COUNT(*) FROM requests WHERE stream = ? AND state = 'refused'", stream)[0][0])

    def begin_step(self, id: str, *, step: int) -> None:
        """Notes the steps of a client when one of its optimizer steps begins."""
        with self.changes() as db:
            db.execute("UPDATE requests SET step_before = ? WHERE id = ?", (step, id))

    def finish(
        self,
        request: StoredRequest,
        answer: Mapping[str, Any],
        *,
        has_failed: bool = False,
        drops_gradients: bool = False,
    ) -> None:
        """Stores an answer, and drops what no repetition needs: the work, and old answers of the same stream.

        The work of a loss is kept until an optimizer step has used its gradients or has dropped them.
        """
        state = RequestState.FAILED if has_failed else RequestState.DONE
        keeps_work = request.kind is EndpointRequestKind.LOSS and not has_failed and request.work["with_gradients"]
        with self.changes() as db:
            sql = "UPDATE requests SET answer = ?, state = ?, work = CASE WHEN ? THEN work END WHERE id = ?"
            db.execute(sql, (json.dumps(answer), state, keeps_work, request.id))
            if drops_gradients or (
                request.kind in (EndpointRequestKind.STEP, EndpointRequestKind.LOAD) and not has_failed
            ):
                db.execute(
                    "UPDATE requests SET work = NULL WHERE stream = ? AND kind = 'loss' AND seq < ?",
                    (request.stream, request.seq),
                )
            db.execute(
                "DELETE FROM requests WHERE stream = ? AND seq < ? AND state = 'refused'", (request.stream, request.seq)
            )
            db.execute(
                "DELETE FROM requests WHERE stream = ? AND seq >= ? AND seq < ? AND work IS NULL",
                (request.stream, request.seq - request.seq % SEQS_OF_CLIENT, request.seq - KEPT_ANSWERS),
            )

    # Checkpoints.

    def add_checkpoint(self, checkpoint: ClientCheckpoint) -> None:
        """Adds a checkpoint, in place of one of the same address."""
        with self.changes() as db:
            sql = (
                "INSERT OR REPLACE INTO checkpoints (uri, owner, model, base, folder, spec, step, created_s, "
                "expires_s, is_snapshot, metadata, num_bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
            )
            db.execute(
                sql,
                (
                    *(checkpoint.uri, checkpoint.owner, checkpoint.model, checkpoint.base, str(checkpoint.folder)),
                    *(json.dumps(checkpoint.spec), checkpoint.step, checkpoint.created_s, checkpoint.expires_s),
                    *(checkpoint.is_snapshot, json.dumps(checkpoint.metadata), checkpoint.num_bytes),
                ),
            )

    def checkpoint(self, uri: str, *, owner: str) -> ClientCheckpoint | None:
        """Returns a checkpoint that has not expired: of an owner, or one that is public."""
        sql = f"uri = ? AND (owner = ? OR is_public) AND {UNEXPIRED}"
        return next(iter(self.checkpoints(where=sql, values=(uri, owner, time.time()))), None)

    def checkpoints(
        self, *, where: str, values: Sequence[Any], limit: int = -1, offset: int = 0
    ) -> list[ClientCheckpoint]:  # fmt: skip
        """Returns checkpoints by a condition, the newest first, whatever the clock said. limit: -1 for all."""
        rows = self._rows(
            f"SELECT * FROM checkpoints WHERE {where} ORDER BY rowid DESC LIMIT ? OFFSET ?",  # noqa: S608 - ours
            *(*values, limit, offset),
        )
        return [_checkpoint(row) for row in rows]

    def num_checkpoints(self, *, where: str, values: Sequence[Any]) -> int:
        """Returns the number of checkpoints by a condition."""
        return int(self._rows(f"SELECT COUNT(*) FROM checkpoints WHERE {where}", *values)[0][0])  # noqa: S608 - ours

    def begin_overwrite(self, uri: str) -> None:
        """Makes a checkpoint private, and outlive its time, before a new one takes the place of its folder."""
        with self.changes() as db:
            db.execute("UPDATE checkpoints SET expires_s = NULL, is_public = 0 WHERE uri = ?", (uri,))

    def set_public(self, uri: str, *, is_public: bool) -> None:
        """Makes a checkpoint readable for all owners, or for its own alone."""
        with self.changes() as db:
            db.execute("UPDATE checkpoints SET is_public = ? WHERE uri = ?", (is_public, uri))

    def set_expiry(self, uri: str, expires_s: float | None) -> None:
        """Sets when a checkpoint expires, in seconds since the epoch; None for never."""
        with self.changes() as db:
            db.execute("UPDATE checkpoints SET expires_s = ? WHERE uri = ?", (expires_s, uri))

    def drop_expired(self) -> None:
        """Removes the checkpoints whose time is over."""
        with self.changes():
            for checkpoint in self.checkpoints(where="expires_s <= ?", values=(time.time(),)):
                self.remove_checkpoint(checkpoint)

    def remove_checkpoint(self, checkpoint: ClientCheckpoint) -> None:
        """Removes a checkpoint, and its folder."""
        with self.changes() as db:
            db.execute("DELETE FROM checkpoints WHERE uri = ?", (checkpoint.uri,))
        shutil.rmtree(checkpoint.folder, ignore_errors=True)


def _client(row: sqlite3.Row) -> TrainingClient:
    values = {key: row[key] for key in TrainingClient.__dataclass_fields__}
    values |= {"spec": json.loads(row["spec"]), "losses": tuple(json.loads(row["losses"]))}
    return TrainingClient(**values | {"is_ended": bool(row["is_ended"])})


def _checkpoint(row: sqlite3.Row) -> ClientCheckpoint:
    plain = dict(row) | {key: bool(row[key]) for key in ("is_snapshot", "is_public")}
    plain |= {"folder": Path(row["folder"]), "spec": json.loads(row["spec"]), "metadata": json.loads(row["metadata"])}
    return ClientCheckpoint(**plain)


def _request(row: sqlite3.Row) -> StoredRequest:
    return StoredRequest(
        id=row["id"],
        owner=row["owner"],
        stream=row["stream"],
        base=row["base"],
        seq=row["seq"],
        kind=EndpointRequestKind(row["kind"]),
        work=json.loads(row["work"] or "{}"),
        model=row["model"],
        state=RequestState(row["state"]),
        step_before=row["step_before"],
    )
