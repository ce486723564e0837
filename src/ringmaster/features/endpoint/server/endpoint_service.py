"""What an endpoint does with requests, whatever their form: it checks them, stores them, and finds their answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ringmaster.features.endpoint.server import messages
from ringmaster.features.endpoint.server.compute_link import CallFailed, ComputeProcessDied
from ringmaster.features.endpoint.server.endpoint_file import ServeEntry
from ringmaster.features.endpoint.server.messages import CheckpointUri, MessageError
from ringmaster.features.endpoint.server.scheduler import BaseScheduler
from ringmaster.features.endpoint.server.store import (
    EndpointRequestKind,
    EndpointStore,
    RequestState,
    StoredRequest,
    StoredSampler,
    TrainingClient,
    digest_of,
)

T = TypeVar("T")

MAX_WAITING = 1000  # requests of one owner
MAX_WAITING_BYTES = 256_000_000  # of the bodies of the requests of one owner that wait
MAX_PENDING_BYTES = 256_000_000  # of the losses of one client since its last optimizer step
MAX_REFUSED = 1000  # messages of one client that are noted as refused
MAX_SESSIONS = 1000  # open ones of one owner
SAVED = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}
"""The type of the answer to a request for a checkpoint, by its kind."""
FINAL = "_final"  # name of the checkpoint of a client that has ended, which no client can give to another


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a request; None while it waits."""

    request: StoredRequest
    value: Mapping[str, Any] | None

    @property
    def has_failed(self) -> bool:
        """Whether it has no result."""
        return self.request.state is RequestState.FAILED


class EndpointService:
    """The clients, their requests, and who waits for answers. Its methods run on the event loop of the server."""

    def __init__(self, serve: ServeEntry, store: EndpointStore) -> None:
        self.serve, self.store = serve, store
        self.schedulers: dict[str, BaseScheduler] = {}
        self.active_s = time.monotonic()  # of the last request or answer but signs of life
        self._folders = {base.name: base.from_pretrained for base in serve.bases}
        self._alive_s: dict[str, float] = dict.fromkeys(store.open_sessions(), time.monotonic())
        self._sizes: dict[str, tuple[str, int]] = {}
        self._waiters: dict[str, set[asyncio.Event]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, schedulers: Mapping[str, BaseScheduler]) -> None:
        """Begins to compute what waits."""
        self.schedulers.update(schedulers)
        for scheduler in schedulers.values():
            for request in self.store.requests(scheduler.base, RequestState.WAITING):
                self._sizes[request.id] = (request.owner, len(json.dumps(request.work)))
            scheduler.start()
        of_finished = "NOT is_ended AND session IN (SELECT id FROM sessions WHERE is_finished)"
        for client in self.store.clients(where=of_finished):
            if client.base in self.schedulers:
                self.end_client(client)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Notes the event loop on which answers are waited for, and that clients can give signs of life from now on."""
        self._loop = loop
        self.active_s = time.monotonic()
        self._alive_s = dict.fromkeys(self._alive_s, self.active_s)

    def on_loop(self, act: Callable[[], T]) -> T:
        """Returns what a function returns on the event loop; called from another thread."""

        async def call() -> T:
            return act()

        assert self._loop is not None, "the server has started"
        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    def on_answer(self, request: StoredRequest) -> None:
        """Tells who waits that an answer is stored; called from the threads that compute."""
        if self._loop is None:  # nobody waits yet
            self._sizes.pop(request.id, None)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell, request.id)

    def _tell(self, id: str) -> None:
        self.active_s = time.monotonic()
        self._sizes.pop(id, None)
        for event in self._waiters.get(id, ()):
            event.set()

    # Sessions.

    def create_session(self, request: messages.SessionRequest, *, owner: str) -> str:
        """Begins a session; returns its id."""
        if self.store.num_sessions(owner) >= MAX_SESSIONS:
            raise MessageError(f"there are {MAX_SESSIONS} open sessions already", status=429)
        id = secrets.token_hex(8)
        metadata = _metadata(request.user_metadata)
        name = request.display_name or str(metadata.get("name", ""))[: messages.MAX_TEXT]
        self.store.add_session(id, owner=owner, name=name, metadata=metadata)
        self._alive_s[id] = time.monotonic()
        return id

    def keep_alive(self, session: str, *, owner: str) -> None:
        """Notes a sign of life of a session. Raises MessageError where it has finished."""
        self._open_session(session, owner=owner)
        self._alive_s[session] = time.monotonic()

    def _open_session(self, id: str, *, owner: str) -> str:
        """Returns the name of an open session."""
        row = self.store.session(id, owner=owner)
        if row is None:
            raise MessageError("there is no such session", status=404)
        if row["is_finished"]:
            raise MessageError("the session has finished", status=410)
        return str(row["name"])

    def expired_sessions(self) -> list[str]:
        """Returns the sessions that gave no sign of life for `client_timeout_s`."""
        now_s = time.monotonic()
        return [id for id, alive_s in self._alive_s.items() if now_s - alive_s > self.serve.client_timeout_s]

    def finish_session(self, id: str) -> None:
        """Ends a session: the state of each of its clients becomes a checkpoint."""
        self._alive_s.pop(id, None)
        self.store.finish_session(id)
        for client in self.store.clients(where="session = ? AND NOT is_ended", values=(id,)):
            if client.base in self.schedulers:  # else it ends when its base is served again
                self.end_client(client)

    def end_client(self, client: TrainingClient) -> None:
        """Ends a client: its state is saved as its last checkpoint, and its place is free for another."""
        uri = CheckpointUri(model=client.id, kind="weights", name=FINAL)
        request = StoredRequest(
            id=f"{client.id}:end",
            owner=client.owner,
            stream=f"{client.id}:end",
            model=client.id,
            base=client.base,
            seq=0,
            kind=EndpointRequestKind.SAVE,
            work={**_save_work(uri), "is_final": True},
        )
        known = self.store.request(request.id, owner=client.owner)
        if known is None or known[0].state is RequestState.FAILED:
            self.store.add(request)
            self.schedulers[client.base].submit(request)

    # Requests that are computed.

    def submit(self, request: StoredRequest) -> str:
        """Stores a request and queues it; returns its id. A repeated one is stored once."""
        self.active_s = time.monotonic()
        known = self.store.digest(request.id)
        if known is not None:
            if known != digest_of(request.work):
                raise MessageError(f"request {request.seq} was sent before, with other content")
            return request.id
        size = len(json.dumps(request.work))
        if sum(owner == request.owner for owner, _ in self._sizes.values()) >= MAX_WAITING:
            raise MessageError(f"{MAX_WAITING} requests wait already", status=429)
        if sum(each for name, each in self._sizes.values() if name == request.owner) + size > MAX_WAITING_BYTES:
            raise MessageError(f"the requests that wait would have more than {MAX_WAITING_BYTES} bytes", status=429)
        if (
            request.kind is EndpointRequestKind.LOSS
            and self.store.pending_bytes(request.stream) + size > MAX_PENDING_BYTES
        ):
            raise MessageError(
                f"the losses since the last optimizer step would have more than {MAX_PENDING_BYTES} bytes. "
                "To fix: take a step first"
            )
        self.store.add(request)
        self._sizes[request.id] = (request.owner, size)
        self.schedulers[request.base].submit(request)
        return request.id

    def refuse(self, model: str, seq: int, *, owner: str, reason: str) -> None:
        """Notes that the message of a client's request was refused, so that its next one does not wait for it."""
        client = self.store.client(model)
        if client is None or client.owner != owner or client.is_ended or client.base not in self.schedulers:
            return
        if self.store.digest(f"{model}:{seq}") or self.store.num_refused(model) >= MAX_REFUSED:
            return
        request = StoredRequest(
            id=f"{model}:{seq}",
            owner=owner,
            stream=model,
            base=client.base,
            seq=seq,
            kind=EndpointRequestKind.LOSS,
            work={"reason": reason[:1000]},
            state=RequestState.REFUSED,
        )
        self.store.add(request)
        self.schedulers[client.base].refuse(request)

    def client(self, model: str, *, owner: str) -> TrainingClient:
        """Returns a live training client of an owner."""
        client = self.store.client(model)
        if client is None or client.owner != owner:
            raise MessageError("there is no such model", status=404)
        self._check_base(client.base)
        self._alive_s[client.session] = time.monotonic()
        return client

    def _check_base(self, base: str | None) -> None:
        if base not in self.schedulers:
            raise MessageError(f"{base!r} is not served here. The bases are {', '.join(self._folders)}")

    def submit_of_client(
        self, model: str, seq: int, kind: EndpointRequestKind, work: Mapping[str, Any], *, owner: str
    ) -> str:
        """Queues a request of a training client; returns its id."""
        client = self.client(model, owner=owner)
        request = StoredRequest(
            id=f"{model}:{seq}",
            owner=owner,
            stream=model,
            model=model,
            base=client.base,
            seq=seq,
            kind=kind,
            work=work,
        )
        if client.is_ended and self.store.digest(request.id) is None:
            uri = CheckpointUri(model=model, kind="weights", name=FINAL)
            raise MessageError(f"the client has ended. To fix: continue from its checkpoint {uri}", status=410)
        return self.submit(request)

    def create_client(self, request: messages.CreateModelRequest, *, owner: str) -> str:
        """Queues the creation of an adapter; returns the id of the request."""
        self._check_base(request.base_model)
        config = request.lora_config
        if not (config.train_mlp or config.train_attn or config.train_unembed):
            raise MessageError("an adapter needs one of train_mlp, train_attn and train_unembed")
        if config.rank > self.serve.max_rank:
            raise MessageError(f"rank {config.rank} is above the {self.serve.max_rank} that are served (max_rank)")
        id = f"{request.session_id}:train:{request.model_seq_id}"
        spec = config.model_dump() | {"seed": _seed(config.seed, id)}
        metadata = _metadata(request.user_metadata)
        return self._add(request.session_id, id, request.base_model, spec, metadata, owner=owner)

    def create_from_checkpoint(self, request: messages.LoadRequest, *, owner: str) -> str:
        """Queues the creation of an adapter that continues from a checkpoint; returns the id of the request."""
        if request.session_id is None or request.model_seq_id is None:
            raise MessageError("a new client needs session_id and model_seq_id")
        uri = CheckpointUri.of(request.path)
        checkpoint = self.store.checkpoint(str(uri), owner=owner)
        if checkpoint is None:
            raise MessageError(f"there is no checkpoint {uri}", status=404)
        self._check_base(checkpoint.base)
        if request.base_model not in (None, checkpoint.base):
            raise MessageError(f"the checkpoint is of the base {checkpoint.base!r}, not of {request.base_model!r}")
        id = f"{request.session_id}:train:{request.model_seq_id}"
        work = {"path": str(uri), "with_optimizer": request.optimizer}
        metadata = _metadata(request.user_metadata)
        return self._add(request.session_id, id, checkpoint.base, checkpoint.spec, metadata, owner=owner, **work)

    def _add(
        self, session: str, id: str, base: str, spec: Mapping[str, Any], metadata: Mapping[str, Any], *, owner: str,
        **work: Any,
    ) -> str:  # fmt: skip
        session_name = self._open_session(session, owner=owner)
        name = str(metadata.get("name") or session_name or id)[: messages.MAX_TEXT]
        if self.store.digest(f"{id}:0") is None:
            waiting = self.store.requests(base, RequestState.WAITING)
            num_clients = len(self.store.clients(where="base = ? AND NOT is_ended", values=(base,)))
            num_clients += sum(each.kind is EndpointRequestKind.CREATE for each in waiting)
            if num_clients >= self.serve.max_adapters:
                raise MessageError(
                    f"{base} has {num_clients} clients, of {self.serve.max_adapters} at most (max_adapters). "
                    "To fix: wait until one has ended, or serve more",
                    status=403,
                )
        request = StoredRequest(
            id=f"{id}:0",
            owner=owner,
            stream=id,
            base=base,
            seq=0,
            kind=EndpointRequestKind.CREATE,
            work={"session": session, "name": name, "spec": dict(spec), **work},
        )
        return self.submit(request)

    def save(self, request: messages.SaveRequest, *, owner: str, kind: str) -> str:
        """Queues a checkpoint of a kind of `CheckpointUri`; returns the id of the request."""
        client = self.client(request.model_id, owner=owner)
        sampler = None
        if request.path is None:
            if kind != "sampler_weights" or request.sampling_session_seq_id is None:
                raise MessageError("path is missing: the name of the checkpoint")
            sampler = f"{client.session}:sample:{request.sampling_session_seq_id}"
        if request.path is not None and request.path.endswith(".tmp"):
            raise MessageError("path ends in .tmp, which is the name of a checkpoint that is being written")
        name = request.path or f"_snapshot-{request.seq_id}"  # which no client can ask for
        uri = CheckpointUri(model=client.id, kind=kind, name=name)
        id = f"{client.id}:{request.seq_id}"
        exists = self.store.checkpoint(str(uri), owner=owner) is not None
        if exists and not request.overwrite and kind == "weights" and self.store.digest(id) is None:
            raise MessageError(f"there is a checkpoint {uri} already. To fix: another name, or overwrite")
        work = {
            **_save_work(uri),
            "type": SAVED[kind],
            "with_optimizer": kind == "weights",
            "sampler": sampler,
            "ttl_s": request.ttl_seconds,
            "metadata": _metadata(request.user_metadata),
        }
        return self.submit_of_client(client.id, request.seq_id, EndpointRequestKind.SAVE, work, owner=owner)

    def load(self, request: messages.LoadRequest, *, owner: str) -> str:
        """Queues the loading of a checkpoint; returns the id of the request."""
        if request.model_id is None or request.seq_id is None:
            return self.create_from_checkpoint(request, owner=owner)
        client, uri = self.client(request.model_id, owner=owner), CheckpointUri.of(request.path)
        checkpoint = self.store.checkpoint(str(uri), owner=owner)
        if checkpoint is None:
            raise MessageError(f"there is no checkpoint {uri}", status=404)
        if checkpoint.base != client.base:
            raise MessageError(f"the checkpoint is of the base {checkpoint.base!r}, not of {client.base!r}")
        work = {"path": str(uri), "with_optimizer": request.optimizer}
        return self.submit_of_client(client.id, request.seq_id, EndpointRequestKind.LOAD, work, owner=owner)

    def create_sampler(self, request: messages.SamplingSessionRequest, *, owner: str) -> str:
        """Begins sampling from a checkpoint or a base; returns the id of the sampler."""
        self._open_session(request.session_id, owner=owner)
        uri = None
        if request.model_path is not None:
            uri = CheckpointUri.of(request.model_path)
            checkpoint = self.store.checkpoint(str(uri), owner=owner)
            if checkpoint is None:
                raise MessageError(f"there is no checkpoint {uri}", status=404)
            base = checkpoint.base
        else:
            base = str(request.base_model)
        self._check_base(base)
        id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        sampler = StoredSampler(
            id=id, owner=owner, session=request.session_id, base=base, checkpoint=None if uri is None else str(uri)
        )
        self.store.add_sampler(sampler)
        if self.store.sampler(id, owner=owner) != sampler:
            raise MessageError("there is a sampler of that number already, of other weights")
        return id

    def sample(self, request: messages.SampleRequest, *, owner: str) -> StoredRequest:
        """Queues a sampling request; returns it."""
        if request.sampling_session_id is None or request.seq_id is None:
            raise MessageError("sampling_session_id and seq_id are missing: begin by create_sampling_session")
        sampler = self.store.sampler(request.sampling_session_id, owner=owner)
        if sampler is None:
            raise MessageError("there is no such sampler", status=404)
        self._check_base(sampler.base)
        folder, model = None, None
        if sampler.checkpoint is not None:
            checkpoint = self.store.checkpoint(sampler.checkpoint, owner=owner)
            if checkpoint is None:
                raise MessageError(f"the checkpoint {sampler.checkpoint} is there no more", status=410)
            folder, model = str(checkpoint.folder), checkpoint.model
        self._alive_s[sampler.session] = time.monotonic()
        stored = StoredRequest(
            id=f"{sampler.id}:{request.seq_id}",
            owner=owner,
            stream=sampler.id,
            model=model,
            base=sampler.base,
            seq=request.seq_id,
            kind=EndpointRequestKind.SAMPLE,
            work={**messages.sample_work(request, seq_len=self.serve.seq_len), "checkpoint": folder},
        )
        self.submit(stored)
        return stored

    # Answers.

    async def answer(self, id: str, *, owner: str, timeout_s: float) -> Answer:
        """Waits for the answer to a request. Raises MessageError where there is no such request."""
        event = asyncio.Event()
        self._waiters.setdefault(id, set()).add(event)
        try:
            answer = self._stored_answer(id, owner=owner)
            if answer.value is None:
                try:
                    await asyncio.wait_for(event.wait(), timeout_s)
                except TimeoutError:
                    return answer
                answer = self._stored_answer(id, owner=owner)
            return answer
        finally:
            self._waiters[id].discard(event)
            if not self._waiters[id]:
                del self._waiters[id]

    def _stored_answer(self, id: str, *, owner: str) -> Answer:
        stored = self.store.request(id, owner=owner)
        if stored is None or stored[0].state is RequestState.REFUSED:
            raise MessageError("there is no such request", status=404)
        return Answer(request=stored[0], value=stored[1])

    def cancel(self, id: str, *, owner: str) -> None:
        """Cancels a sampling request that has not begun."""
        request = self._stored_answer(id, owner=owner).request
        if request.kind is EndpointRequestKind.SAMPLE and request.state is RequestState.WAITING:
            self.schedulers[request.base].cancel(request)

    # What is known of clients and checkpoints.

    def info(self, model: str, *, owner: str) -> dict[str, Any]:
        """Returns what a client asks about itself. Its tokenizer is found in the folder of the base."""
        client = self.client(model, owner=owner)
        data = {"arch": None, "model_name": client.base, "tokenizer_id": self._folders[client.base]}
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": client.id,
            "is_lora": True,
            "lora_rank": client.spec["rank"],
            "model_name": client.base,
        }

    def weights_info(self, path: str, *, owner: str) -> dict[str, Any]:
        """Returns what is known of a checkpoint."""
        uri = CheckpointUri.of(path)
        checkpoint = self.store.checkpoint(str(uri), owner=owner)
        if checkpoint is None:
            raise MessageError(f"there is no checkpoint {uri}", status=404)
        keys = ("train_unembed", "train_mlp", "train_attn")
        plain = {key: checkpoint.spec.get(key, True) for key in keys}
        return {"base_model": checkpoint.base, "is_lora": True, "lora_rank": checkpoint.spec["rank"], **plain}

    def capabilities(self) -> dict[str, Any]:
        """Returns the bases."""
        models = [
            {
                "model_name": base.name,
                "max_context_length": self.serve.seq_len,
                "trainable": True,
                "sampleable": True,
            }
            for base in self.serve.bases
        ]
        return {"supported_models": models}

    async def price(self, base: str, spec: messages.AdapterMessage) -> dict[str, Any]:
        """Returns what one more client would cost."""
        self._check_base(base)
        scheduler = self.schedulers[base]
        values = spec.model_dump() | {"seed": spec.seed or 0}
        try:
            price = await asyncio.to_thread(scheduler.call, lambda link: link.call("price", spec=values))
        except (CallFailed, ComputeProcessDied) as error:
            raise MessageError(str(error)) from error
        return dict(price)


def _save_work(uri: CheckpointUri) -> dict[str, Any]:
    return {
        "uri": str(uri),
        "folder": f"{uri.kind}-{uri.name}",
        "type": "save_weights",
        "with_optimizer": True,
        "sampler": None,
        "ttl_s": None,
        "is_final": False,
    }


def _seed(seed: int | None, id: str) -> int:
    """Returns the seed of an adapter: that of the request, or one that a repeated request draws too."""
    return int(hashlib.sha256(id.encode()).hexdigest()[:8], 16) if seed is None else seed % 2**63


def _metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    result = dict(metadata or {})
    if len(json.dumps(result)) > messages.MAX_METADATA:
        raise MessageError(f"user_metadata has more than {messages.MAX_METADATA} characters")
    return result
