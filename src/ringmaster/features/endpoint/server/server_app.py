"""The HTTP routes of an endpoint: the paths, keys and forms of the Tinker API."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ringmaster.codec import finite
from ringmaster.features.endpoint.server import binary_messages, messages
from ringmaster.features.endpoint.server.endpoint_service import EndpointService
from ringmaster.features.endpoint.server.messages import MessageError
from ringmaster.features.endpoint.server.record_routes import DOWNLOAD_PATH, Downloads, Handler, RecordRoutes
from ringmaster.features.endpoint.server.request_bodies import body_of, fault, json_of, message_of, parsed
from ringmaster.features.endpoint.server.store import EndpointRequestKind
from ringmaster.origins import is_foreign
from ringmaster.text import shortened

API = "/api/v1"
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
POLL_S = 20.0
"""How long an answer is waited for; the client then asks again."""
CLIENT_CONFIG = {"pjwt_auth_enabled": False, "custom_loss_server_side": False, "sample_join_sampling_session": True}
DYNAMIC_CONFIG = {"sample_cancel_enabled": True}


class EndpointApp:
    """The routes. keys: the key of each owner."""

    def __init__(self, service: EndpointService, *, keys: Mapping[str, str]) -> None:
        self._service, self._keys = service, keys
        posts: dict[str, Handler] = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "unload_model": self._unload_model,
            "forward": self._loss,
            "forward_backward": self._loss,
            "optim_step": self._optim_step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
            "load_weights": self._load,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampler,
            "join_sampling_session": self._join_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
            "telemetry": self._telemetry,
            "price": self._price,
            "sessions/{session}/finish": self._finish_session,
        }
        gets: dict[str, Handler] = {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._sampler,
        }
        downloads = Downloads(service, keys=keys)
        routes = [
            *(Route(f"{API}/{path}", self._checked(each), methods=["POST"]) for path, each in posts.items()),
            *(Route(f"{API}/{path}", self._checked(each), methods=["GET"]) for path, each in gets.items()),
            *(
                Route(f"{API}/{path}", self._checked(each), methods=[method])
                for (method, path), each in RecordRoutes(service, downloads).routes.items()
            ),
            Route(f"{API}/{DOWNLOAD_PATH}", downloads.download, methods=["GET"]),
            Route(f"{API}/{{path:path}}", self._checked(self._unknown), methods=METHODS),
        ]
        self.app = Starlette(routes=routes)

    def _checked(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            if is_foreign(request.scope):
                return fault("a page of another origin may not read this", 403)
            key = request.headers.get("x-api-key", "").encode()
            owners = [owner for owner, each in self._keys.items() if hmac.compare_digest(key, each.encode())]
            if not owners:
                return fault("the key of the endpoint is needed, in the header X-API-Key", 401)
            try:
                return await handler(request, owners[0])
            except MessageError as error:
                return fault(str(error), error.status)
            except ClientDisconnect:
                return fault("the client has gone", 499)

        return answer

    async def _of_client(self, request: Request, owner: str, act: Callable[[dict[str, Any]], str]) -> Response:
        """Queues a request of a training client. Where it is refused, the next one does not wait for it."""
        value = json_of(await body_of(request))
        return self._queued(value, owner, act)

    def _queued(self, value: dict[str, Any], owner: str, act: Callable[[dict[str, Any]], str]) -> Response:
        model, seq = value.get("model_id"), value.get("seq_id")
        try:
            return JSONResponse({"request_id": act(value), "model_id": model})
        except MessageError as error:
            is_named = isinstance(model, str) and type(seq) is int and 0 <= seq < 2**31
            if is_named and error.status in (400, 404, 422) and not str(error).endswith("other content"):
                self._service.refuse(str(model), int(str(seq)), owner=owner, reason=str(error))
            raise

    # Sessions and what a client asks at first.

    async def _client_config(self, request: Request, owner: str) -> Response:
        await message_of(request, messages.OpenMessage)
        return JSONResponse(CLIENT_CONFIG)

    async def _dynamic_config(self, request: Request, owner: str) -> Response:
        await message_of(request, messages.OpenMessage)
        return JSONResponse(DYNAMIC_CONFIG)

    async def _create_session(self, request: Request, owner: str) -> Response:
        session = self._service.create_session(await message_of(request, messages.SessionRequest), owner=owner)
        return JSONResponse({"type": "create_session", "session_id": session})

    async def _heartbeat(self, request: Request, owner: str) -> Response:
        self._service.keep_alive((await message_of(request, messages.SessionName)).session_id, owner=owner)
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish_session(self, request: Request, owner: str) -> Response:
        session = request.path_params["session"]
        if self._service.store.session(session, owner=owner) is None:
            raise MessageError("there is no such session", status=404)
        self._service.finish_session(session)
        return JSONResponse({})

    async def _capabilities(self, request: Request, owner: str) -> Response:
        return JSONResponse(self._service.capabilities())

    async def _health(self, request: Request, owner: str) -> Response:
        return JSONResponse({"status": "ok"})

    async def _telemetry(self, request: Request, owner: str) -> Response:
        await body_of(request)
        return JSONResponse({"status": "accepted"})

    async def _price(self, request: Request, owner: str) -> Response:
        value = json_of(await body_of(request))
        base = value.pop("base_model", None)
        spec = parsed(messages.AdapterMessage, value)
        return JSONResponse(await self._service.price(str(base), spec))

    # Training.

    async def _create_model(self, request: Request, owner: str) -> Response:
        message = await message_of(request, messages.CreateModelRequest)
        return JSONResponse({"request_id": self._service.create_client(message, owner=owner)})

    async def _get_info(self, request: Request, owner: str) -> Response:
        model = (await message_of(request, messages.ModelIdMessage)).model_id
        return JSONResponse(self._service.info(model, owner=owner))

    async def _unload_model(self, request: Request, owner: str) -> Response:
        client = self._service.client((await message_of(request, messages.ModelIdMessage)).model_id, owner=owner)
        self._service.end_client(client)
        return JSONResponse({"request_id": f"{client.id}:end", "model_id": client.id})

    async def _loss(self, request: Request, owner: str) -> Response:
        content = await body_of(request)
        if request.headers.get("content-type", "").startswith(binary_messages.CONTENT_TYPE):
            message = messages.readable(binary_messages.loss_message_of, content)
            head = {"model_id": message.model_id, "seq_id": message.seq_id}
            read = partial(binary_messages.loss_request_of, message)
        else:
            head = json_of(content)
            read = partial(self._of_json, head)
        return self._queued(head, owner, lambda _: self._submit_loss(messages.readable(read), owner))

    def _of_json(self, value: Mapping[str, Any]) -> dict[str, Any]:
        return messages.parsed_loss(parsed(messages.ForwardBackwardRequest, value))

    def _submit_loss(self, value: Mapping[str, Any], owner: str) -> str:
        model, seq = value["model_id"], value["seq_id"]
        if not 1 <= seq < 2**31:
            raise MessageError("seq_id must be at least 1")
        work = messages.loss_work(value, seq_len=self._service.serve.seq_len)
        return self._service.submit_of_client(model, seq, EndpointRequestKind.LOSS, work, owner=owner)

    async def _optim_step(self, request: Request, owner: str) -> Response:
        def act(value: dict[str, Any]) -> str:
            message = parsed(messages.OptimStepRequest, value)
            work = message.adam_params.model_dump()
            return self._service.submit_of_client(
                message.model_id, message.seq_id, EndpointRequestKind.STEP, work, owner=owner
            )

        return await self._of_client(request, owner, act)

    async def _save(self, request: Request, owner: str) -> Response:
        return await self._save_as(request, owner, kind="weights")

    async def _save_for_sampler(self, request: Request, owner: str) -> Response:
        return await self._save_as(request, owner, kind="sampler_weights")

    async def _save_external(self, request: Request, owner: str) -> Response:
        def act(value: dict[str, Any]) -> str:
            message = parsed(messages.SaveExternalRequest, value)
            return self._service.save(message.plain(), owner=owner, kind="external_weights")

        return await self._of_client(request, owner, act)

    async def _save_as(self, request: Request, owner: str, *, kind: str) -> Response:
        def act(value: dict[str, Any]) -> str:
            return self._service.save(parsed(messages.SaveRequest, value), owner=owner, kind=kind)

        return await self._of_client(request, owner, act)

    async def _load(self, request: Request, owner: str) -> Response:
        return await self._of_client(
            request, owner, lambda value: self._service.load(parsed(messages.LoadRequest, value), owner=owner)
        )

    async def _weights_info(self, request: Request, owner: str) -> Response:
        path = (await message_of(request, messages.CheckpointPath)).tinker_path
        return JSONResponse(self._service.weights_info(path, owner=owner))

    # Sampling.

    async def _create_sampler(self, request: Request, owner: str) -> Response:
        message = await message_of(request, messages.SamplingSessionRequest)
        sampler = self._service.create_sampler(message, owner=owner)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def _join_sampler(self, request: Request, owner: str) -> Response:
        value = json_of(await body_of(request))
        sampler = self._service.store.sampler(str(value.get("sampling_session_id")), owner=owner)
        if sampler is None:
            raise MessageError("there is no such sampler", status=404)
        counter = self._service.store.join_sampler(sampler.id)
        return JSONResponse({"type": "join_sampling_session", "client_counter": counter})

    async def _sampler(self, request: Request, owner: str) -> Response:
        sampler = self._service.store.sampler(request.path_params["sampler"], owner=owner)
        if sampler is None:
            raise MessageError("there is no such sampler", status=404)
        path = sampler.checkpoint
        return JSONResponse({"sampler_id": sampler.id, "base_model": sampler.base, "model_path": path})

    async def _sample(self, request: Request, owner: str) -> Response:
        stored = self._service.sample(await message_of(request, messages.SampleRequest), owner=owner)
        names = [f"{stored.id}:{i}" for i in range(stored.work["num_samples"])]
        return JSONResponse({"request_id": stored.id, "sample_sequence_ids": names})

    # Answers.

    async def _retrieve(self, request: Request, owner: str) -> Response:
        id = (await message_of(request, messages.RetrieveRequest)).request_id
        answer = await self._service.answer(id, owner=owner, timeout_s=POLL_S)
        value = answer.value
        if value is None:
            state = {"type": "try_again", "request_id": id, "queue_state": "active"}
            return JSONResponse(state, status_code=408)
        if answer.has_failed:
            return JSONResponse(value)
        kind = answer.request.kind
        is_binary = binary_messages.CONTENT_TYPE in request.headers.get("accept", "")
        if is_binary and kind in (EndpointRequestKind.LOSS, EndpointRequestKind.SAMPLE):
            write = binary_messages.loss_answer if kind is EndpointRequestKind.LOSS else binary_messages.sample_answer
            return Response(write(value), media_type=binary_messages.CONTENT_TYPE)
        plain = messages.loss_answer_in_json(value) if kind is EndpointRequestKind.LOSS else value
        return JSONResponse(finite(plain))

    async def _cancel(self, request: Request, owner: str) -> Response:
        self._service.cancel((await message_of(request, messages.RequestName)).request_id, owner=owner)
        return JSONResponse({})

    async def _unknown(self, request: Request, owner: str) -> Response:
        return fault(f"{request.method} {shortened(request.url.path, 100)} is not served by this endpoint", 404)
