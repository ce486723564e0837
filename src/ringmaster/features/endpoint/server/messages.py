"""The JSON form of the Tinker API's messages, checked, and the plain values that both forms become.

The values are what is stored, computed and answered: JSON whose tensors are `{"dtype", "shape", "data"}` with the bytes
in base64, so that no bit is lost.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from ringmaster.features.endpoint.server.sparse_tensors import SparseTensor
from ringmaster.text import shortened

T = TypeVar("T")

MAX_TEXT = 200
MAX_SAID = 500
MAX_ROWS = 1024
MAX_SAMPLES = 256
MAX_STOPS = 64
MAX_TOPK = 64
MAX_ELEMENTS = 2**22  # of the tensors of a request, with what sparse ones leave out
MAX_METADATA = 10_000  # characters of what a client notes about itself
MAX_INT = 2**63 - 1

Text = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)]
CheckpointName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
Sequence1 = Annotated[int, Field(ge=0, le=2**62)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Number = Annotated[float, Field(allow_inf_nan=False)]


Ttl = Annotated[int, Field(ge=1, le=400_000_000)]


class MessageError(ValueError):
    """A message that cannot be used. status: of the HTTP answer."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def readable(read: Callable[..., T], *values: Any) -> T:
    """Returns what `read` makes of a message. Raises MessageError where it raises ValueError or OverflowError."""
    try:
        return read(*values)
    except MessageError:
        raise
    except (ValueError, OverflowError) as error:
        raise MessageError(shortened(str(error), MAX_SAID)) from error


class Message(BaseModel):
    """Base of all messages. What a message asks beyond these fields is refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class OpenMessage(BaseModel):
    """A message of which only the named fields are used."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())


class SessionRequest(OpenMessage):
    """Begins a session of a client program."""

    user_metadata: dict[str, Any] | None = None
    display_name: Annotated[str, StringConstraints(max_length=MAX_TEXT)] | None = None


class SessionName(OpenMessage):
    """Names a session."""

    session_id: Text


class AdapterMessage(Message):
    """The LoRA of a new client."""

    rank: Annotated[int, Field(ge=1, le=2**20)]
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_INT)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerMessage(Message):
    """The optimizer of a new client; there is one kind."""

    type: Literal["adamw"] = "adamw"


class CreateModelRequest(Message):
    """Adds an adapter of a base."""

    type: Literal["create_model"] = "create_model"
    session_id: Text
    model_seq_id: Sequence1
    base_model: Text
    user_metadata: dict[str, Any] | None = None
    lora_config: AdapterMessage
    optimizer_config: OptimizerMessage = OptimizerMessage()


class ModelIdMessage(Message):
    """Names a training client."""

    type: str = ""
    model_id: Text


class TokensChunk(Message):
    """A part of a prompt or row."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Token]


class ModelInput(Message):
    """The tokens of a prompt or row, in parts."""

    chunks: list[TokensChunk]

    def tokens(self) -> list[int]:
        """Returns all tokens."""
        return [token for chunk in self.chunks for token in chunk.tokens]


class TensorMessage(Message):
    """A tensor, dense or of compressed sparse rows (CSR)."""

    data: list[float] | list[int]
    dtype: Literal["float32", "int64"]
    shape: Annotated[list[Sequence1], Field(max_length=4)] | None = None
    sparse_crow_indices: list[Sequence1] | None = None
    sparse_col_indices: list[Sequence1] | None = None

    def array(self) -> np.ndarray | SparseTensor:
        """Returns the tensor. Raises ValueError where the shape has another number of elements."""
        if self.dtype == "int64" and any(isinstance(each, float) for each in self.data):
            raise ValueError("a tensor of int64 has values that are not whole")
        with np.errstate(over="ignore"):  # what is beyond float32 becomes infinite, and is refused
            values = np.asarray(self.data, dtype=self.dtype)
        if self.sparse_crow_indices is not None or self.sparse_col_indices is not None:
            rows, columns = (np.asarray(x or [], np.int64) for x in (self.sparse_crow_indices, self.sparse_col_indices))
            return SparseTensor.of(values, rows=rows, columns=columns, shape=tuple(self.shape or ()))
        return values if self.shape is None else values.reshape(self.shape)


class DatumMessage(Message):
    """A row."""

    model_input: ModelInput
    loss_fn_inputs: dict[Text, TensorMessage]


class LossInput(Message):
    """The rows and the loss of a request."""

    data: Annotated[list[DatumMessage], Field(max_length=MAX_ROWS)]
    loss_fn: Text
    loss_fn_config: dict[Text, float | str] | None = None


class ForwardBackwardRequest(Message):
    """A loss with its gradients, or without where it has `forward_input`."""

    type: str = ""
    model_id: Text
    seq_id: Sequence1
    forward_backward_input: LossInput | None = None
    forward_input: LossInput | None = None


class AdamMessage(Message):
    """The settings of one step."""

    learning_rate: Annotated[Number, Field(ge=0)] = 1e-4
    beta1: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[Number, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[Number, Field(ge=0)] = 1e-12
    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[Number, Field(ge=0)] = 0.0


class OptimStepRequest(Message):
    """One step of the optimizer."""

    type: str = ""
    model_id: Text
    seq_id: Sequence1
    adam_params: AdamMessage


class SaveRequest(Message):
    """Writes a checkpoint, for training or for sampling."""

    type: str = ""
    model_id: Text
    seq_id: Sequence1
    path: CheckpointName | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: Sequence1 | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class SaveExternalRequest(Message):
    """Writes a checkpoint in a form that other programs read."""

    type: str = ""
    model_id: Text
    seq_id: Sequence1
    path: CheckpointName
    ttl_seconds: Ttl | None = None
    age_encryption_recipients: None = None

    def plain(self) -> SaveRequest:
        """Returns what it has in common with other checkpoints."""
        return SaveRequest(
            model_id=self.model_id, seq_id=self.seq_id, path=self.path, ttl_seconds=self.ttl_seconds, overwrite=True
        )


class TtlRequest(Message):
    """Sets after how many seconds a checkpoint expires; None for never."""

    ttl_seconds: Ttl | None


class Page(Message):
    """Which part of a list is asked for. project_id: there are no projects."""

    limit: Annotated[int, Field(ge=1, le=1000, strict=False)] = 100
    offset: Annotated[int, Field(ge=0, le=MAX_INT, strict=False)] = 0
    access_scope: Literal["owned", "accessible"] = "owned"
    project_id: None = None


class LoadRequest(Message):
    """Loads a checkpoint into a client, or into a new one of a session."""

    type: str = ""
    model_id: Text | None = None
    seq_id: Sequence1 | None = None
    session_id: Text | None = None
    model_seq_id: Sequence1 | None = None
    base_model: Text | None = None
    user_metadata: dict[str, Any] | None = None
    path: Text
    optimizer: bool
    optimizer_config: OptimizerMessage | None = None
    weights_access_token: None = None


class SamplingSessionRequest(Message):
    """Begins sampling from a checkpoint or a base."""

    type: str = ""
    session_id: Text
    sampling_session_seq_id: Sequence1
    base_model: Text | None = None
    model_path: Text | None = None


class SamplingParams(Message):
    """How tokens are drawn."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_INT)] | None = None
    stop: (
        Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)]
        | Annotated[list[Text], Field(max_length=MAX_STOPS)]
        | Annotated[list[Token], Field(max_length=MAX_STOPS)]
        | None
    ) = None
    temperature: Annotated[Number, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**31)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class SampleRequest(Message):
    """Sequences after a prompt."""

    type: str = ""
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: Text | None = None
    model_path: Text | None = None
    sampling_session_id: Text | None = None
    seq_id: Sequence1 | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOPK)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=MAX_TOPK)] = 0
    target_prompt_logprobs: TensorMessage | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=MAX_TOPK)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    record_stability_info: Literal[False] | None = None


class RetrieveRequest(Message):
    """Asks for the answer to a request."""

    request_id: Text
    allow_metadata_only: bool = False


class RequestName(OpenMessage):
    """Names a request."""

    request_id: Text


class CheckpointPath(OpenMessage):
    """Names a checkpoint."""

    tinker_path: Text


@dataclass(frozen=True, kw_only=True)
class CheckpointUri:
    """The address of a checkpoint, such as `tinker://3f2a:train:0/weights/step-10`.

    kind: "weights", which training continues from, "sampler_weights", or "external_weights" for other programs.
    """

    model: str
    kind: str
    name: str

    @classmethod
    def of(cls, text: str) -> CheckpointUri:
        """Reads an address. Raises MessageError where it is none."""
        match = re.fullmatch(r"tinker://([\w:-]+)/(weights|sampler_weights|external_weights)/([\w.-]+)", text)
        if match is None:
            raise MessageError(
                f"{text[:MAX_TEXT]!r} is no address of a checkpoint, such as tinker://MODEL/weights/NAME"
            )
        return cls(model=match[1], kind=match[2], name=match[3])

    def __str__(self) -> str:
        return f"tinker://{self.model}/{self.kind}/{self.name}"


def tensor_to_json(values: np.ndarray) -> dict[str, Any]:
    """Returns a tensor as plain values."""
    data = base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
    return {"dtype": str(values.dtype), "shape": list(values.shape), "data": data}


def tensor_of_json(tensor: Mapping[str, Any]) -> np.ndarray:
    """Returns the tensor of plain values."""
    values = np.frombuffer(base64.b64decode(tensor["data"]), dtype=tensor["dtype"])
    return values.reshape(tensor["shape"])


def parsed_loss(request: ForwardBackwardRequest) -> dict[str, Any]:
    """Returns a loss request in JSON as `binary_messages.loss_request_of` returns one in the binary form."""
    content = request.forward_backward_input or request.forward_input
    if content is None or (request.forward_backward_input and request.forward_input):
        raise MessageError("a request has either forward_backward_input or forward_input")
    return {
        "model_id": request.model_id,
        "seq_id": request.seq_id,
        "is_forward": request.forward_backward_input is None,
        "loss_fn": content.loss_fn,
        "loss_fn_config": dict(content.loss_fn_config or {}),
        "data": [
            {
                "tokens": each.model_input.tokens(),
                "inputs": {name: tensor.array() for name, tensor in each.loss_fn_inputs.items()},
            }
            for each in content.data
        ],
    }


def loss_work(request: Mapping[str, Any], *, seq_len: int) -> dict[str, Any]:
    """Returns the work of a loss request. Raises MessageError where its rows cannot be computed."""
    rows = request["data"]
    if not 1 <= len(rows) <= MAX_ROWS:
        raise MessageError(f"a request has 1 to {MAX_ROWS} rows, not {len(rows)}")
    if len(request["loss_fn"]) > MAX_TEXT:
        raise MessageError(f"loss_fn has more than {MAX_TEXT} characters")
    config = {}
    for key, value in request["loss_fn_config"].items():
        if isinstance(value, str) or not np.isfinite(value):
            raise MessageError(f"loss_fn_config {key[:MAX_TEXT]!r} must be a finite number")
        config[key] = float(value)
    return {
        "loss": request["loss_fn"],
        "config": config,
        "with_gradients": not request["is_forward"],
        "rows": [_row(row, seq_len=seq_len) for row in _dense_rows(rows)],
    }


def _dense_rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yields rows whose tensors are dense. Raises MessageError where they would be too large."""
    left = MAX_ELEMENTS
    for row in rows:
        left -= sum(int(np.prod(each.shape, dtype=float)) for each in row["inputs"].values())
        if left < 0:
            raise MessageError(f"the tensors of a request have more than {MAX_ELEMENTS} elements")
        dense = {key: x.dense() if isinstance(x, SparseTensor) else x for key, x in row["inputs"].items()}
        yield {**row, "inputs": dense}


def _row(row: Mapping[str, Any], *, seq_len: int) -> dict[str, Any]:
    tokens: Sequence[int] = row["tokens"]
    if not 1 <= len(tokens) <= seq_len:
        raise MessageError(f"a row has 1 to {seq_len} tokens (seq_len), not {len(tokens)}")
    if min(tokens) < 0:
        raise MessageError("a token is negative")
    inputs = {}
    for name, values in row["inputs"].items():
        if values.shape[:1] != (len(tokens),) or values.ndim > 2 or not values.size:
            raise MessageError(
                f"{name[:MAX_TEXT]} has the shape {list(values.shape)}, and a row of {len(tokens)} tokens needs "
                f"one value for each: [{len(tokens)}], or as many for each"
            )
        if not np.isfinite(values).all():
            raise MessageError(f"{name[:MAX_TEXT]} has values that are not finite")
        inputs[name] = tensor_to_json(values.astype("float32" if values.dtype.kind == "f" else "int64"))
    if "target_tokens" not in inputs:
        raise MessageError("target_tokens is missing: the token that follows each token of the row")
    if row["inputs"]["target_tokens"].dtype.kind != "i" or (row["inputs"]["target_tokens"] < 0).any():
        raise MessageError("target_tokens must be token ids")
    return {"tokens": list(tokens), "inputs": inputs}


def sample_work(request: SampleRequest, *, seq_len: int) -> dict[str, Any]:
    """Returns the work of a sampling request. Raises MessageError where it cannot be computed."""
    prompt, params = request.prompt.tokens(), request.sampling_params
    room = seq_len - len(prompt)
    if not prompt or room < 1:
        raise MessageError(f"a prompt has 1 to {seq_len - 1} tokens (seq_len less one), not {len(prompt)}")
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not (request.prompt_logprobs and last_n < len(prompt)):
        raise MessageError("prompt_logprobs_last_n needs prompt_logprobs, and is below the length of the prompt")
    layout, targets = _targets(request.target_prompt_logprobs, num_places=len(prompt) - 1)
    stop: list[Any] | None = None
    if params.stop is not None:
        stops = [params.stop] if isinstance(params.stop, str) else params.stop
        stop = [each if isinstance(each, str) else [each] for each in stops]
    return {
        "prompt": prompt,
        "num_samples": request.num_samples,
        "max_tokens": min(room, params.max_tokens or room),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop": stop,
        "seed": params.seed,
        "with_prompt_logprobs": bool(request.prompt_logprobs),
        "topk_prompt_logprobs": request.topk_prompt_logprobs,
        "topk_sample_logprobs": request.topk_sample_logprobs,
        "target_prompt_tokens": targets,
        "prompt_alt_tokens": request.prompt_alt_tokens_k,
        "last_n": last_n,
        "target_layout": layout,
    }


def _targets(message: TensorMessage | None, *, num_places: int) -> tuple[dict[str, Any] | None, list[list[int]] | None]:
    """Returns how the answer to `target_prompt_logprobs` is laid out, and the tokens of each place; -1 for none."""
    if message is None:
        return None, None
    values = readable(message.array)
    shape = values.shape
    if message.dtype != "int64" or len(shape) != 2 or shape[0] != num_places or shape[0] * shape[1] > MAX_ELEMENTS:
        raise MessageError(
            f"target_prompt_logprobs has the type {message.dtype} and the shape {list(shape)}, and needs int64 and as "
            f"many tokens for each of {num_places} places: [{num_places}, K]"
        )
    layout: dict[str, Any] = {"shape": list(shape), "listed": None}
    if isinstance(values, SparseTensor):
        layout |= {
            "listed": values.places().tolist(),
            "sparse_crow_indices": values.rows.tolist(),
            "sparse_col_indices": values.columns.tolist(),
        }
        values = values.dense(fill=-1)
    if values.size and values.min() < -1:
        raise MessageError("target_prompt_logprobs has negative tokens besides -1")
    return layout, values.tolist()


def loss_answer_in_json(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a stored answer to a loss request in the JSON form."""
    outputs = [
        {name: {**tensor, "data": tensor_of_json(tensor).ravel().tolist()} for name, tensor in output.items()}
        for output in answer["outputs"]
    ]
    return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": answer["metrics"]}
