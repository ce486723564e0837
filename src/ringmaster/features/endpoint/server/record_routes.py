"""The HTTP routes by which programs look at what an endpoint keeps: sessions, training runs, and their checkpoints.

A checkpoint that is published can be read, loaded and sampled from by every owner, and changed by its own alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from ringmaster.features.endpoint.server import messages
from ringmaster.features.endpoint.server.compute_link import CallFailed, ComputeProcessDied
from ringmaster.features.endpoint.server.endpoint_service import FINAL, EndpointService
from ringmaster.features.endpoint.server.messages import CheckpointUri, MessageError
from ringmaster.features.endpoint.server.request_bodies import fault, message_of, parsed
from ringmaster.features.endpoint.server.store import UNEXPIRED, ClientCheckpoint, TrainingClient

Handler = Callable[[Request, str], Awaitable[Response]]

URL_TTL_S = 3600.0
RUNS_PER_PAGE = 20
TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
CHECKPOINT = "training_runs/{run}/checkpoints/{kind}/{name}"
DOWNLOAD_PATH = "downloads/{owner}/{expires_s:int}/{signature}/{run}/{kind}/{name}/{file:path}"


class RecordRoutes:
    """The routes, by method and path."""

    def __init__(self, service: EndpointService, downloads: Downloads) -> None:
        self._service, self._store, self._downloads = service, service.store, downloads
        self.routes: Mapping[tuple[str, str], Handler] = {
            ("GET", "sessions"): self._sessions,
            ("GET", "sessions/{session}"): self._session,
            ("GET", "training_runs"): self._runs,
            ("GET", "training_runs/{run}"): self._run,
            ("GET", "training_runs/{run}/checkpoints"): self._checkpoints_of_run,
            ("GET", "checkpoints"): self._checkpoints,
            ("DELETE", CHECKPOINT): self._delete,
            ("POST", f"{CHECKPOINT}/publish"): self._publish,
            ("DELETE", f"{CHECKPOINT}/publish"): self._unpublish,
            ("PUT", f"{CHECKPOINT}/ttl"): self._set_ttl,
            ("GET", f"{CHECKPOINT}/external_weights_urls"): self._urls,
        }

    # Sessions and runs.

    async def _sessions(self, request: Request, owner: str) -> Response:
        page = _page(request)
        return JSONResponse({"sessions": self._store.sessions(owner, limit=page.limit, offset=page.offset)})

    async def _session(self, request: Request, owner: str) -> Response:
        session = request.path_params["session"]
        row = self._store.session(session, owner=owner)
        if row is None:
            raise MessageError("there is no such session", status=404)
        clients = self._store.clients(where="session = ?", values=(session,))
        value = {"training_run_ids": [each.id for each in clients], "sampler_ids": self._store.samplers_of(session)}
        return JSONResponse(value | {"display_name": row["name"] or None})

    async def _runs(self, request: Request, owner: str) -> Response:
        page = _page(request, limit=RUNS_PER_PAGE)
        where, values = "owner = ?", [owner]
        if page.access_scope == "accessible":
            where += " OR id IN (SELECT model FROM checkpoints WHERE is_public)"
        clients = self._store.clients(where=where, values=values)[::-1]
        chosen = clients[page.offset : page.offset + page.limit]
        runs = [self._run_of(client, owner) for client in chosen]
        return JSONResponse({"training_runs": runs, "cursor": _cursor(page, total_count=len(clients))})

    async def _run(self, request: Request, owner: str) -> Response:
        page = _page(request)
        client = self._store.client(request.path_params["run"])
        is_readable = client is not None and (
            client.owner == owner or (page.access_scope == "accessible" and bool(self._of_run(client, owner)))
        )
        if client is None or not is_readable:
            raise MessageError("there is no such model", status=404)
        return JSONResponse(self._run_of(client, owner))

    def _run_of(self, client: TrainingClient, owner: str) -> dict[str, Any]:
        value: dict[str, Any] = {
            "training_run_id": client.id,
            "base_model": client.base,
            "model_owner": client.owner,
            "is_lora": True,
            "lora_rank": client.spec["rank"],
            "last_request_time": _time(client.active_s),
        }
        newest = self._of_run(client, owner)
        for key, kind in (("last_checkpoint", "weights"), ("last_sampler_checkpoint", "sampler_weights")):
            value[key] = next((_plain(each) for each in newest if each.kind == kind), None)
        return value

    # Checkpoints.

    def _of_run(self, client: TrainingClient, owner: str) -> list[ClientCheckpoint]:
        where = f"model = ? AND (owner = ? OR is_public) AND NOT is_snapshot AND {UNEXPIRED}"
        return self._store.checkpoints(where=where, values=(client.id, owner, time.time()))

    async def _checkpoints_of_run(self, request: Request, owner: str) -> Response:
        client = self._store.client(request.path_params["run"])
        readable = [] if client is None else self._of_run(client, owner)
        if client is None or (client.owner != owner and not readable):
            raise MessageError("there is no such model", status=404)
        return JSONResponse({"checkpoints": [_plain(each) for each in readable]})

    async def _checkpoints(self, request: Request, owner: str) -> Response:
        page = _page(request)
        where, values = f"owner = ? AND NOT is_snapshot AND {UNEXPIRED}", (owner, time.time())
        chosen = self._store.checkpoints(where=where, values=values, limit=page.limit, offset=page.offset)
        total = self._store.num_checkpoints(where=where, values=values)
        return JSONResponse(
            {"checkpoints": [_plain(each) for each in chosen], "cursor": _cursor(page, total_count=total)}
        )

    def _own(self, request: Request, owner: str) -> ClientCheckpoint:
        """Returns the checkpoint that a request names, to change it."""
        checkpoint = checkpoint_of(self._service, request, owner)
        if checkpoint.owner != owner or checkpoint.is_snapshot:
            raise MessageError(f"there is no checkpoint {checkpoint.uri}", status=404)
        return checkpoint

    async def _change(self, request: Request, owner: str, change: Callable[[ClientCheckpoint], None]) -> Response:
        """Changes the checkpoint that a request names between computations: one of its name may be in the making."""
        scheduler = self._service.schedulers.get(self._own(request, owner).base)

        def act(_: Any) -> None:
            change(self._own(request, owner))

        try:
            await asyncio.to_thread(act if scheduler is None else lambda _: scheduler.call(act), None)
        except (CallFailed, ComputeProcessDied) as error:
            raise MessageError(str(error), status=409) from error
        return Response(status_code=204)

    async def _delete(self, request: Request, owner: str) -> Response:
        def remove(checkpoint: ClientCheckpoint) -> None:
            self._check_recorded(checkpoint)
            self._store.remove_checkpoint(checkpoint)

        return await self._change(request, owner, remove)

    def _check_recorded(self, checkpoint: ClientCheckpoint) -> None:
        """Raises MessageError for the last checkpoint of a client that the lineage does not have yet."""
        where = "id = ? AND is_ended AND NOT is_recorded"
        if checkpoint.uri.endswith(f"/{FINAL}") and self._store.clients(where=where, values=(checkpoint.model,)):
            raise MessageError(f"{checkpoint.uri} is being recorded. To fix: try again in a minute", status=409)

    async def _publish(self, request: Request, owner: str) -> Response:
        return await self._change(request, owner, partial(self._set_public, is_public=True))

    async def _unpublish(self, request: Request, owner: str) -> Response:
        return await self._change(request, owner, partial(self._set_public, is_public=False))

    def _set_public(self, checkpoint: ClientCheckpoint, *, is_public: bool) -> None:
        if checkpoint.is_public == is_public:
            raise MessageError(f"{checkpoint.uri} is {'public' if is_public else 'private'} already", status=409)
        self._store.set_public(checkpoint.uri, is_public=is_public)

    async def _set_ttl(self, request: Request, owner: str) -> Response:
        ttl_s = (await message_of(request, messages.TtlRequest)).ttl_seconds

        def expire(checkpoint: ClientCheckpoint) -> None:
            self._check_recorded(checkpoint)
            self._store.set_expiry(checkpoint.uri, None if ttl_s is None else time.time() + ttl_s)

        return await self._change(request, owner, expire)

    async def _urls(self, request: Request, owner: str) -> Response:
        checkpoint = checkpoint_of(self._service, request, owner)
        if checkpoint.kind != "external_weights":
            raise MessageError(f"{checkpoint.uri} is no checkpoint of save_weights_external")
        expires_s = int(time.time() + URL_TTL_S)
        files = await asyncio.to_thread(files_of, checkpoint)
        urls = {
            file: self._downloads.url(request, checkpoint, file, owner=owner, expires_s=expires_s) for file in files
        }
        return JSONResponse({"urls": urls, "expires": _time(expires_s)})


class Downloads:
    """Files of checkpoints at addresses that are signed by the key of who asked for them, and are good for an hour."""

    def __init__(self, service: EndpointService, *, keys: Mapping[str, str]) -> None:
        self._service, self._keys = service, keys

    def url(self, request: Request, checkpoint: ClientCheckpoint, file: str, *, owner: str, expires_s: int) -> str:
        """Returns the address of a file, for whoever has it."""
        signature = self._signature(checkpoint.uri, file, owner=owner, expires_s=expires_s)
        place = checkpoint.uri.removeprefix("tinker://")
        base = str(request.url).partition("/training_runs/")[0]
        return f"{base}/downloads/{quote(owner)}/{expires_s}/{signature}/{quote(place)}/{quote(file)}"

    def _signature(self, uri: str, file: str, *, owner: str, expires_s: int) -> str:
        content = json.dumps([uri, file, owner, expires_s]).encode()
        return hmac.new(self._keys[owner].encode(), content, hashlib.sha256).hexdigest()

    async def download(self, request: Request) -> Response:
        """Answers with a file."""
        path = request.path_params
        owner, file, expires_s = path["owner"], path["file"], path["expires_s"]
        uri = f"tinker://{path['run']}/{path['kind']}/{path['name']}"
        if owner not in self._keys:
            return fault("the address is not signed", 403)
        signature = self._signature(uri, file, owner=owner, expires_s=expires_s)
        if not hmac.compare_digest(signature.encode(), path["signature"].encode()) or time.time() > expires_s:
            return fault("the address is not signed, or its time is over", 403)
        try:
            checkpoint = checkpoint_of(self._service, request, owner)
            files = await asyncio.to_thread(files_of, checkpoint)
        except MessageError as error:
            return fault(str(error), error.status)
        if file not in files:
            return fault("there is no such file", 404)
        return FileResponse(files[file])


def files_of(checkpoint: ClientCheckpoint) -> dict[str, Path]:
    """Returns the files of a checkpoint by their paths in it."""
    files = sorted(path for path in checkpoint.folder.rglob("*") if path.is_file())
    return {path.relative_to(checkpoint.folder).as_posix(): path for path in files}


def checkpoint_of(service: EndpointService, request: Request, owner: str) -> ClientCheckpoint:
    """Returns the checkpoint in the path of a request. Raises MessageError where an owner can read none."""
    path = request.path_params
    uri = CheckpointUri.of(f"tinker://{path['run']}/{path['kind']}/{path['name']}")
    checkpoint = service.store.checkpoint(str(uri), owner=owner)
    if checkpoint is None:
        raise MessageError(f"there is no checkpoint {uri}", status=404)
    return checkpoint


def _page(request: Request, *, limit: int | None = None) -> messages.Page:
    default = {} if limit is None else {"limit": limit}
    return parsed(messages.Page, default | dict(request.query_params))


def _cursor(page: messages.Page, *, total_count: int) -> dict[str, int]:
    return {"offset": page.offset, "limit": page.limit, "total_count": total_count}


def _plain(checkpoint: ClientCheckpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": checkpoint.uri.removeprefix(f"tinker://{checkpoint.model}/"),
        "checkpoint_type": TYPES[checkpoint.kind],
        "training_run_id": checkpoint.model,
        "time": _time(checkpoint.created_s),
        "tinker_path": checkpoint.uri,
        "size_bytes": checkpoint.num_bytes,
        "public": checkpoint.is_public,
        "user_metadata": dict(checkpoint.metadata) or None,
        "expires_at": None if checkpoint.expires_s is None else _time(checkpoint.expires_s),
    }


def _time(epoch_s: float) -> str:
    return datetime.fromtimestamp(epoch_s, UTC).isoformat()
