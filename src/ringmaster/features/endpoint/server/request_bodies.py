"""Bodies of requests to an endpoint: their bounds, their compression, and the messages in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import zstandard
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ringmaster.features.endpoint.server.messages import MAX_SAID, MessageError
from ringmaster.text import shortened

M = TypeVar("M", bound=BaseModel)

MAX_BODY_BYTES = 32_000_000


def fault(message: str, status: int) -> Response:
    """Returns an answer that says what is wrong."""
    return JSONResponse({"detail": message}, status_code=status)


async def body_of(request: Request) -> bytes:
    """Returns the body, uncompressed. Raises MessageError where it is too large or damaged."""
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MAX_BODY_BYTES:
            raise MessageError(f"the body has more than {MAX_BODY_BYTES} bytes", status=413)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "zstd":
        try:
            with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(bytes(content)) as reader:
                plain = reader.read(MAX_BODY_BYTES + 1)
        except zstandard.ZstdError as error:
            raise MessageError(f"the body is not zstd: {error}") from error
        if len(plain) > MAX_BODY_BYTES:
            raise MessageError(f"the body has more than {MAX_BODY_BYTES} bytes", status=413)
        return bytes(plain)
    if encoding != "identity":
        raise MessageError(f"the encoding {encoding[:50]!r} is not read: zstd is", status=415)
    return bytes(content)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def json_of(content: bytes) -> dict[str, Any]:
    """Returns the object in a JSON body."""
    try:
        value = json.loads(content.decode(), parse_constant=_refuse_constant)
        if b"\\ud" in content.lower():
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise MessageError(f"the body is not JSON: {type(error).__name__}") from error
    if not isinstance(value, dict):
        raise MessageError("the body must be a JSON object")
    return value


def parsed(cls: type[M], value: Mapping[str, Any]) -> M:
    """Returns a message. Raises MessageError with the first fault."""
    try:
        return cls.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise MessageError(shortened(f"{place}: {first['msg']}", MAX_SAID), status=422) from error


async def message_of(request: Request, cls: type[M]) -> M:
    """Returns the message in the body of a request."""
    return parsed(cls, json_of(await body_of(request)))
