"""The binary form of the Tinker API's messages: protocol buffers, whose fields are declared here.

Requests become the same plain values as the JSON form; answers are written from the values that are stored.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from ringmaster.features.endpoint.server.sparse_tensors import SparseTensor

CONTENT_TYPE = "application/x-protobuf"
PACKAGE = "tinker_public"
FLOAT32, INT64 = 1, 2
DTYPES = {FLOAT32: "float32", INT64: "int64", 3: "int32"}
"""Element types of tensors by their numbers in messages."""

# Of each message: its fields as (number, name, type). `[T]` is repeated, `{T}` a mapping from text, `T?` has presence,
# and `T|group` belongs to a group of which one field is set.
MESSAGES: Mapping[str, Sequence[tuple[int, str, str]]] = {
    "SparseCsr": [(1, "values", "bytes"), (2, "crow_indices", "bytes"), (3, "col_indices", "bytes")],
    "Tensor": [
        *((1, "dense", "bytes|encoding"), (2, "sparse_csr", "SparseCsr|encoding")),
        *((3, "dtype", "int32"), (4, "shape", "[int64]")),
    ],
    "EncodedTextChunk": [(1, "tokens", "bytes")],
    "ImageChunk": [(1, "data", "bytes"), (2, "format", "string")],
    "DmelChunk": [(1, "dmel", "bytes")],
    "Chunk": [
        *((1, "encoded_text", "EncodedTextChunk|chunk"), (2, "image", "ImageChunk|chunk")),
        (3, "dmel", "DmelChunk|chunk"),
    ],
    "Datum": [(1, "model_input", "[Chunk]"), (2, "loss_fn_inputs", "{Tensor}")],
    "LossConfigValue": [(1, "number", "double|value"), (2, "text", "string|value")],
    "ForwardBackwardRequest": [
        *((1, "model_id", "string"), (2, "seq_id", "int32"), (3, "data", "[Datum]"), (4, "loss_fn", "string")),
        *((5, "loss_fn_config", "{double}"), (6, "forward_only", "bool")),
        (7, "loss_fn_config_v2", "{LossConfigValue}"),
    ],
    "BatchedTensor": [
        *((1, "data", "bytes"), (2, "offsets", "bytes"), (3, "dtype", "int32")),
        (4, "trailing_shape", "[int64]"),
    ],
    "ArrayRecord": [(1, "type_tag", "string"), (2, "fields", "{BatchedTensor}"), (3, "num_datums", "int64")],
    "ForwardBackwardOutput": [
        *((1, "loss_fn_output_type", "string"), (2, "loss_fn_outputs", "[ArrayRecord]")),
        (3, "metrics", "{double}"),
    ],
    "TopkLogprobs": [(1, "token_ids", "bytes"), (2, "logprobs", "bytes"), (3, "k", "uint32"), (4, "length", "uint32")],
    "SampledSequence": [
        *((1, "stop_reason", "int32"), (2, "tokens", "bytes"), (3, "logprobs", "bytes?")),
        (4, "topk_sampled_logprobs", "TopkLogprobs?"),
    ],
    "PromptAltTokens": [(1, "tokens", "Tensor"), (2, "logprobs", "Tensor")],
    "SampleResponse": [
        *((1, "sequences", "[SampledSequence]"), (2, "prompt_logprobs", "bytes?")),
        *((3, "topk_prompt_logprobs", "TopkLogprobs?"), (4, "prompt_cache_hit_tokens", "int32")),
        *((5, "target_prompt_logprobs", "Tensor?"), (6, "prompt_alt_tokens", "PromptAltTokens?")),
    ],
}
STOP_REASONS = {"stop": 0, "length": 1}
NO_LOGPROB = -99999.0
"""What stands in a matrix of most probable tokens where a place has fewer."""
OUTPUT_TYPE = "ArrayRecord"

_Field = descriptor_pb2.FieldDescriptorProto


@cache
def message_class(name: str) -> Any:
    """Returns the class of a message of `MESSAGES`."""
    return _classes()[f"{PACKAGE}.{name}"]


@cache
def _classes() -> Mapping[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="tinker_public.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field, kind in fields:
            _declare(message, number, field, kind)
    # A pool of its own: a program that has the client, too, declares the same names in the default pool.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes: Mapping[str, Any] = message_factory.GetMessageClassesForFiles([file.name], pool)
    return classes


def _declare(message: descriptor_pb2.DescriptorProto, number: int, name: str, kind: str) -> None:
    kind, _, group = kind.partition("|")
    label = _Field.LABEL_REPEATED if kind[0] in "[{" else _Field.LABEL_OPTIONAL
    field = message.field.add(name=name, number=number, label=label)
    inner = kind.strip("[]{}?")
    if kind.startswith("{"):
        entry = message.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _declare(entry, 1, "key", "string")
        _declare(entry, 2, "value", inner)
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{message.name}.{entry.name}"
    elif inner in MESSAGES:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{inner}"
    else:
        field.type = getattr(_Field, f"TYPE_{inner.upper()}")
    has_presence = kind.endswith("?") and inner not in MESSAGES
    if group or has_presence:
        names = [each.name for each in message.oneof_decl]
        group = group or f"_{name}"
        if group not in names:
            message.oneof_decl.add(name=group)
            names.append(group)
        field.oneof_index, field.proto3_optional = names.index(group), has_presence


def loss_message_of(body: bytes) -> Any:
    """Returns a `ForwardBackwardRequest`. Raises ValueError where the bytes are none."""
    message = message_class("ForwardBackwardRequest")()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise ValueError(f"the body is not a ForwardBackwardRequest: {error}") from error
    return message


def loss_request_of(message: Any) -> dict[str, Any]:
    """Returns the plain values of a `ForwardBackwardRequest`. Raises ValueError where this endpoint cannot read it."""
    config: dict[str, Any] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        config[key] = value.text if value.WhichOneof("value") == "text" else value.number
    return {
        "model_id": message.model_id,
        "seq_id": message.seq_id,
        "is_forward": message.forward_only,
        "loss_fn": message.loss_fn,
        "loss_fn_config": config,
        "data": [_datum(each) for each in message.data],
    }


def _datum(datum: Any) -> dict[str, Any]:
    tokens: list[int] = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise ValueError(f"a chunk of {kind or 'nothing'}: this endpoint reads tokens alone")
        tokens += _array(chunk.encoded_text.tokens, "int32").tolist()
    inputs = {name: _tensor(each, name) for name, each in datum.loss_fn_inputs.items()}
    return {"tokens": tokens, "inputs": inputs}


def _tensor(tensor: Any, name: str) -> np.ndarray | SparseTensor:
    """Returns a tensor."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ValueError(f"{name} has the unknown element type {tensor.dtype}")
    if tensor.HasField("sparse_csr"):
        csr = tensor.sparse_csr
        rows, columns = _array(csr.crow_indices, "int64"), _array(csr.col_indices, "int64")
        return SparseTensor.of(_array(csr.values, dtype), rows=rows, columns=columns, shape=tuple(tensor.shape))
    values = _array(tensor.dense, dtype)
    shape = tuple(tensor.shape)
    return values.reshape(shape) if shape else values


def _array(content: bytes, dtype: str) -> np.ndarray:
    return np.frombuffer(content, dtype=np.dtype(dtype).newbyteorder("<"))


def loss_answer(answer: Mapping[str, Any]) -> bytes:
    """Returns a stored answer to a loss request as `ForwardBackwardOutput`."""
    message = message_class("ForwardBackwardOutput")(loss_fn_output_type=OUTPUT_TYPE, metrics=answer["metrics"])
    for _, alike in groupby(answer["outputs"], key=_trailing_shapes):  # a record has one shape behind the tokens
        outputs = list(alike)
        record = message.loss_fn_outputs.add(type_tag=OUTPUT_TYPE, num_datums=len(outputs))
        for name, first in outputs[0].items():
            parts = [base64.b64decode(output[name]["data"]) for output in outputs]
            field = record.fields[name]
            field.data, field.dtype = b"".join(parts), FLOAT32 if first["dtype"] == "float32" else INT64
            field.offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64).tobytes()
            field.trailing_shape.extend(first["shape"][1:])
    return bytes(message.SerializeToString())


def _trailing_shapes(output: Mapping[str, Any]) -> list[list[int]]:
    return [tensor["shape"][1:] for tensor in output.values()]


def sample_answer(answer: Mapping[str, Any]) -> bytes:
    """Returns a stored answer to a sampling request as `SampleResponse`."""
    message = message_class("SampleResponse")()
    for sequence in answer["sequences"]:
        added = message.sequences.add(
            stop_reason=STOP_REASONS[sequence["stop_reason"]],
            tokens=np.asarray(sequence["tokens"], np.int32).tobytes(),
            logprobs=np.asarray(sequence["logprobs"], np.float32).tobytes(),
        )
        if (topk := sequence.get("topk_logprobs")) is not None:
            _write_topk(added.topk_sampled_logprobs, topk)
    if (logprobs := answer.get("prompt_logprobs")) is not None:
        message.prompt_logprobs = np.asarray([np.nan if x is None else x for x in logprobs], np.float32).tobytes()
    if (places := answer.get("topk_prompt_logprobs")) is not None:
        _write_topk(message.topk_prompt_logprobs, places)
    if (targets := answer.get("target_prompt_logprobs")) is not None:
        _write_tensor(message.target_prompt_logprobs, targets)
    if (drawn := answer.get("prompt_alt_tokens")) is not None:
        _write_tensor(message.prompt_alt_tokens.tokens, drawn["tokens"])
        _write_tensor(message.prompt_alt_tokens.logprobs, drawn["logprobs"])
    return bytes(message.SerializeToString())


def _write_tensor(message: Any, tensor: Mapping[str, Any]) -> None:
    """Writes a tensor whose values are numbers, dense or of compressed sparse rows."""
    values = np.asarray(tensor["data"], tensor["dtype"]).tobytes()
    message.dtype = FLOAT32 if tensor["dtype"] == "float32" else INT64
    message.shape.extend(tensor["shape"])
    if "sparse_crow_indices" in tensor:
        message.sparse_csr.values = values
        message.sparse_csr.crow_indices = np.asarray(tensor["sparse_crow_indices"], np.int64).tobytes()
        message.sparse_csr.col_indices = np.asarray(tensor["sparse_col_indices"], np.int64).tobytes()
    else:
        message.dense = values


def _write_topk(message: Any, places: Sequence[Sequence[tuple[int, float]] | None]) -> None:
    """Writes the most probable tokens of each place; one without any, such as the first, has `NO_LOGPROB` alone."""
    k = max((len(place) for place in places if place), default=0)
    ids = np.zeros((len(places), k), np.int32)
    logprobs = np.full((len(places), k), NO_LOGPROB, np.float32)
    for i, place in enumerate(places):
        for j, (token, logprob) in enumerate(_pairs(place)):
            ids[i, j], logprobs[i, j] = token, logprob
    message.k, message.length = k, len(places)
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()


def _pairs(place: Sequence[tuple[int, float]] | None) -> Iterator[tuple[int, float]]:
    yield from place or ()
