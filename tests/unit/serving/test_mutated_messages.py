"""Mutated requests of the client `tinker`, in both forms: each is answered, none by a fault of the server."""

import base64
import json
import random
from pathlib import Path

import numpy as np
import pytest

from ringmaster.features.endpoint.server import binary_messages, server_app
from tests.mutations import mutants, torn
from tests.unit.serving.clients import BINARY, loss_json, running

RECORDED = json.loads((Path(__file__).parents[2] / "recorded" / "tinker_requests.json").read_text())
SESSION = b"0123456789abcdef"  # in the recorded requests
ODD = [
    b"",
    b"\0",
    b"\xff" * 9,
    np.asarray([-1, 2**31 - 1], np.int32).tobytes(),
    np.full(5, np.nan, np.float32).tobytes(),
]


SPARSE = {"shape": [3, 2], "sparse_crow_indices": [0, 1, 1, 3], "sparse_col_indices": [1, 0, 1]}


def _sparse_loss(model):
    message = loss_json(model, 3)
    message["forward_backward_input"]["data"][0]["loss_fn_inputs"] = {
        "target_tokens": {"data": [5, 6, 7], "dtype": "int64", **SPARSE},
        "weights": {"data": [1.0, 2.0, 3.0], "dtype": "float32", **SPARSE},
    }
    return message


def _scored_sample(session):
    return {
        "sampling_session_id": f"{session}:sample:0",
        "seq_id": 7,
        "prompt": {"chunks": [{"tokens": [1, 2, 3, 4]}]},
        "sampling_params": {"max_tokens": 2},
        "topk_sample_logprobs": 1,
        "prompt_alt_tokens_k": 2,
        "target_prompt_logprobs": {"data": [4, 8, 9], "dtype": "int64", **SPARSE},
    }


def requests(session):
    """The recorded requests of a session, and the JSON form of losses, which earlier clients send."""
    model = f"{session}:train:0"
    older = [("forward_backward", loss_json(model, 1)), ("forward", loss_json(model, 2, key="forward_input"))]
    older += [("forward_backward", _sparse_loss(model)), ("asample", _scored_sample(session))]
    recorded = [(each["path"], each.get("json") or base64.b64decode(each["binary"])) for each in RECORDED]
    for path, value in [*recorded, *older]:
        yield (
            path,
            value
            if isinstance(value, bytes)
            else json.loads(json.dumps(value).encode().replace(SESSION, session.encode())),
        )


def changed(content, draw):
    """A loss request in binary with one of its fields changed."""
    message = binary_messages.message_class("ForwardBackwardRequest").FromString(content)
    datum = draw.choice(message.data)
    tensor = datum.loss_fn_inputs[draw.choice([*datum.loss_fn_inputs, "advantages", "é" * 300])]
    match draw.randrange(9):
        case 0:
            message.seq_id = draw.choice([0, -1, 2**31 - 1, 3])
        case 1:
            tensor.dtype = draw.choice([0, 3, 4, 99, -1])
        case 2:
            tensor.shape[:] = draw.choice([[], [0], [-1], [2**62, 2**62], [1, len(tensor.dense)], [5, 1, 1, 1, 1] * 9])
        case 3:
            tensor.dense = draw.choice(ODD)
        case 4:
            tensor.sparse_csr.values = draw.choice(ODD)
            tensor.sparse_csr.crow_indices = draw.choice([*ODD, np.zeros(4, np.int64).tobytes()])
            tensor.shape[:] = draw.choice([[-1, 2], [3, -1], [3, 2], [2**62, 2**62], [0, 0]])
        case 5:
            datum.model_input.add().encoded_text.tokens = draw.choice(ODD)
        case 6:
            datum.model_input.add().image.data = b"x"
        case 7:
            message.loss_fn_config_v2["x" * draw.choice([1, 500])].text = "y"
            message.loss_fn_config["clip"] = draw.choice([float("nan"), float("inf"), 1e308])
        case _:
            message.loss_fn = draw.choice(["", "ppo", "os:system", "x" * 10_000])
            del message.data[:]
    return message.SerializeToString()


def mutated(session, count):
    """Yields paths, bodies and headers."""
    recorded = [*requests(session)]
    for number in range(count):
        draw = random.Random(number)
        path, value = recorded[number % len(recorded)]
        if isinstance(value, bytes):
            content = value.replace(SESSION, session.encode())
            content = changed(content, draw) if draw.random() < 0.5 else torn(content, draw)
            yield path, content, BINARY
        else:
            (content,) = mutants(value, count=1, seed=number, is_json=True)
            yield path, content, {"Content-Type": "application/json"}


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.full)])
def test_no_mutated_message_is_a_fault_of_the_server(count, tmp_path, monkeypatch):
    monkeypatch.setattr(server_app, "POLL_S", 0.01)
    with running(tmp_path, max_adapters=10_000) as endpoint:
        client = endpoint.client()
        session = client.session()
        client.model(session)
        statuses = []
        for path, content, headers in mutated(session, count):
            answer = client.http.post(path, content=content, headers=headers)
            statuses.append(answer.status_code)
            assert answer.status_code < 500, (path, content, answer.text)
            assert answer.json() is not None or answer.headers["content-type"] == binary_messages.CONTENT_TYPE
        assert 0.3 < np.mean([400 <= status < 500 for status in statuses]) < 1
        other = client.model()
        client.result(client.loss(other, 1))
        assert client.result(client.step(other, 2))["metrics"] == {"grad_norm": 1.0}
