"""The process of an endpoint that computes: it reads calls from stdin and answers each on stdout, a line of JSON each.

    {"call": "compute", "requests": [...]}   ->   {"answer": [{"outputs": ..., "metrics": ...} or {"refusal": ...}]}

Tensors are `{"dtype", "shape", "data"}` with their bytes in base64. The process ends with its stdin. What libraries
print goes to stderr.
"""

from __future__ import annotations

import base64
import fcntl
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ringmaster.codec import from_json, to_json
from ringmaster.features.endpoint.compute.requests import (
    AdamStep,
    AdapterSpec,
    EndpointLimits,
    EndpointLostError,
    LossRequest,
    LossResult,
    RequestRefusal,
    SampleResult,
    SamplingRequest,
    TokenRow,
)
from ringmaster.registry import resolve
from ringmaster.text import message_of

logger = logging.getLogger(__name__)

LOCK_FILE = "process.lock"
TARGET_TOKENS = "target_prompt_tokens"

Value = Mapping[str, Any]


def tensor_to_json(tensor: torch.Tensor) -> dict[str, Any]:
    """Returns a tensor of floats or integers as plain values of float32 or int64."""
    flat = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else torch.int64).contiguous()
    content = base64.b64encode(flat.numpy().tobytes()).decode()
    return {"dtype": str(flat.dtype).removeprefix("torch."), "shape": list(flat.shape), "data": content}


def tensor_of_json(value: Value) -> torch.Tensor:
    """Returns the tensor of plain values."""
    content, dtype = bytearray(base64.b64decode(value["data"])), getattr(torch, value["dtype"])
    return torch.frombuffer(content, dtype=dtype).reshape(value["shape"]) if content else torch.empty(0, dtype=dtype)


def _loss_request(value: Value) -> LossRequest:
    rows = (
        TokenRow(
            tokens=tuple(row["tokens"]),
            loss_inputs={name: tensor_of_json(each) for name, each in row["inputs"].items()},
        )
        for row in value["rows"]
    )
    return LossRequest(
        client=value["client"],
        rows=tuple(rows),
        loss=value["loss"],
        loss_config=value["config"],
        with_gradients=value["with_gradients"],
    )


def _sample_request(value: Value) -> SamplingRequest:
    stop, checkpoint = value["stop"], value["checkpoint"]
    return SamplingRequest(
        **{key: each for key, each in value.items() if key not in ("stop", "checkpoint", "prompt", TARGET_TOKENS)},
        prompt=tuple(value["prompt"]),
        target_prompt_tokens=None if value.get(TARGET_TOKENS) is None else tuple(map(tuple, value[TARGET_TOKENS])),
        stop=None if stop is None else tuple(each if isinstance(each, str) else tuple(each) for each in stop),
        checkpoint=None if checkpoint is None else Path(checkpoint),
    )


def _result_to_json(result: Any) -> Any:
    if isinstance(result, RequestRefusal):
        return {"refusal": result.reason, "drops_gradients": result.drops_gradients}
    if isinstance(result, LossResult):
        outputs = [{name: tensor_to_json(each) for name, each in output.items()} for output in result.outputs]
        return {"outputs": outputs, "metrics": dict(result.metrics)}
    return to_json(result) if isinstance(result, SampleResult) else dict(result)


def calls_of(endpoint: Any) -> Mapping[str, Callable[[Value], Any]]:
    """Returns what answers each call, by its name."""

    def add(value: Value) -> None:
        if value["client"] not in endpoint.clients():
            endpoint.add(value["client"], from_json(AdapterSpec, value["spec"]))

    def remove(value: Value) -> None:
        if value["client"] in endpoint.clients():
            endpoint.remove(value["client"])

    def load(value: Value) -> None:
        endpoint.load(value["client"], Path(value["path"]), with_optimizer=value["with_optimizer"])

    def sample(value: Value) -> dict[str, Any]:
        results = endpoint.sample_in_turns(
            {name: _sample_request(each) for name, each in value["requests"].items()},
            num_tokens=value["num_tokens"],
            begun=value["begun"],
        )
        return {name: None if each is None else _result_to_json(each) for name, each in results.items()}

    return {
        "add": add,
        "remove": remove,
        "load": load,
        "forget_gradients": lambda value: endpoint.forget_gradients(value["client"]),
        "clients": lambda value: {
            name: {"step": state.step, "grad_norm": state.grad_norm} for name, state in endpoint.clients().items()
        },
        "compute": lambda value: [*map(_result_to_json, endpoint.compute([*map(_loss_request, value["requests"])]))],
        "step": lambda value: [
            *map(_result_to_json, endpoint.step([from_json(AdamStep, each) for each in value["steps"]]))
        ],
        "save": lambda value: str(
            endpoint.save(value["client"], value["name"], with_optimizer=value["with_optimizer"])
        ),
        "sample": sample,
        "price": lambda value: to_json(endpoint.price(from_json(AdapterSpec, value["spec"]))),
    }


def _answer(make: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"answer": make()}
    except EndpointLostError:
        raise  # this process ends, and the next one begins with what is on disk
    except ValueError as error:  # a refusal
        return {"error": message_of(error)}
    except Exception as error:  # the caller learns of it, and this process goes on
        logger.exception("a call has failed")
        return {"error": f"{type(error).__name__}: {message_of(error)}"}


def main() -> None:
    """Makes the endpoint that the first line of stdin describes, and answers calls until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    logging.basicConfig(stream=sys.stderr, level=logging.ERROR, format="%(asctime)s %(message)s")
    logging.getLogger("torch").setLevel(logging.ERROR)  # whose warnings concern its developers
    settings = json.loads(sys.stdin.readline())
    folder = Path(settings["folder"])
    endpoint: Any = None
    lock: Any = None

    def make() -> None:
        nonlocal endpoint, lock
        if cores := settings["cores"]:
            os.sched_setaffinity(0, cores)
            torch.set_num_threads(len(cores))
        lock = (folder / LOCK_FILE).open("a")
        fcntl.flock(lock, fcntl.LOCK_EX)  # the process of a server that was killed may still end its computation
        endpoint = resolve(settings["endpoint"])(
            base=settings["base"],
            limits=from_json(EndpointLimits, settings["limits"]),
            folder=folder,
            device=settings["device"],
            precision=settings["precision"],
        )

    answers.write(json.dumps(made := _answer(make)) + "\n")
    if "error" in made:
        sys.exit(1)
    calls = calls_of(endpoint)
    for line in sys.stdin:
        value = json.loads(line)
        try:
            answer = _answer(lambda value=value: calls[value["call"]](value))  # type: ignore[misc]
        except EndpointLostError as error:
            answers.write(json.dumps({"lost": message_of(error)}) + "\n")
            raise
        answers.write(json.dumps(answer) + "\n")
    endpoint.close()


if __name__ == "__main__":
    main()
