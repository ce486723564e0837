"""An endpoint in this process, and a plain client of it."""

import json
import threading
from contextlib import contextmanager
from dataclasses import replace

import httpx
import numpy as np

from ringmaster.codec import from_json
from ringmaster.features.endpoint.compute.process import calls_of
from ringmaster.features.endpoint.compute.requests import EndpointLimits
from ringmaster.features.endpoint.server import binary_messages
from ringmaster.features.endpoint.server.compute_link import CallFailed, ComputeLink, ComputeProcessDied
from ringmaster.features.endpoint.server.endpoint_file import BaseEntry, EndpointFile, ServeEntry
from ringmaster.features.endpoint.server.endpoint_server import EndpointServer
from ringmaster.features.endpoint.server.replicas import CPU
from tests.unit.serving.fake_endpoint import FakeEndpoint

FAKE = "tests.unit.serving.fake_endpoint:FakeEndpoint"


class LinkInProcess(ComputeLink):
    """Calls the fake endpoint in this process; `kill` makes it forget what is not on disk."""

    _calls = None

    def start(self):
        self._settings.folder.mkdir(parents=True, exist_ok=True)
        make = {"base": self._settings.base, "folder": self._settings.folder, "device": "cpu"}
        try:
            self._calls = calls_of(FakeEndpoint(limits=from_json(EndpointLimits, self._settings.limits), **make))
        except ValueError as error:
            raise CallFailed(str(error)) from error

    def call(self, name, /, **values):
        if self._calls is None:
            raise ComputeProcessDied("the process has ended")
        try:
            return json.loads(json.dumps(self._calls[name](json.loads(json.dumps(values)))))
        except SystemExit as error:
            self._calls = None
            raise ComputeProcessDied("the process has ended with status 9") from error
        except Exception as error:
            raise CallFailed(str(error)) from error

    def kill(self):
        self._calls = None

    def close(self):
        self._calls = None


def process_link(settings):
    """A link to a process with the fake endpoint."""
    return ComputeLink(replace(settings, endpoint=FAKE))


BINARY = {"Content-Type": binary_messages.CONTENT_TYPE}


def entry_of(**serve):
    plain = {
        "bases": [BaseEntry.model_construct(name="tiny", from_pretrained="base")],
        "owners": ["ann"],
        "max_adapters": 16,
        "max_rank": 32,
        "seq_len": 64,
        "idle_s": 600.0,
        "client_timeout_s": 300.0,
        "device": "cpu",
        "port": None,
    }
    return EndpointFile.model_construct(name="fake", serve=ServeEntry.model_construct(**plain | serve))


def eventually(is_so):
    """Whether a condition holds within half a minute."""
    return any(is_so() or threading.Event().wait(0.05) for _ in range(600))


class RunningEndpoint:
    """A server with the fake endpoint."""

    def __init__(self, home, link_of=LinkInProcess, **serve):
        self.links = []

        def made(settings):
            self.links.append(link_of(settings))
            return self.links[-1]

        self.server = EndpointServer(entry_of(**serve), home=home, devices=[CPU], link_of=made)
        self.folder = home / "endpoints" / "fake"
        self.result = []
        self._clients = []
        self._answers = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        while not self._answers.wait(0.05):
            assert self.thread.is_alive(), self.result

    def _run(self):
        try:
            self.result.append(self.server.run(self._announce))
        except Exception as error:  # noqa: BLE001 - for the test that reads it
            self.result.append(error)

    def _announce(self, served):
        self.served = served
        self._answers.set()

    def client(self, owner="ann"):
        client = PlainClient(self.served.url, self.served.keys[owner])
        self._clients.append(client)
        return client

    def end(self):
        for client in self._clients:
            client.http.close()
        self.server.end()
        self.thread.join()

    def calls(self):
        (file,) = self.folder.glob("bases/*/calls.jsonl")
        return [json.loads(line) for line in file.read_text().splitlines()]


@contextmanager
def running(home, **options):
    endpoint = RunningEndpoint(home, **options)
    try:
        yield endpoint
    finally:
        endpoint.end()


class PlainClient:
    """Posts messages."""

    def __init__(self, url, key):
        self.http = httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=60, trust_env=False)

    def post(self, path, body=None, *, status=200, **options):
        answer = self.http.post(path, **({"json": body} if body is not None else {}), **options)
        assert answer.status_code == status, (answer.status_code, answer.text)
        return answer.json()

    def session(self, **more):
        return self.post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0", **more})[
            "session_id"
        ]

    def model(self, session=None, number=0, *, rank=4, status=200, **more):
        session = session or self.session()
        body = {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": {"rank": rank}}
        request = self.post("create_model", body | more, status=status)
        return request if status != 200 else self.result(request)["model_id"]

    def result(self, request):
        while True:
            answer = self.http.post("retrieve_future", json={"request_id": request["request_id"]})
            if answer.status_code != 408:
                assert answer.status_code == 200, answer.text
                return answer.json()

    def loss(self, model, seq, tokens=(1, 2, 3), *, status=200, **options):
        content = loss_message(model, seq, tokens, **options).SerializeToString()
        return self.post("forward_backward", content=content, headers=BINARY, status=status)

    def step(self, model, seq, *, status=200, **params):
        body = {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.1, **params}}
        return self.post("optim_step", body, status=status)


def loss_message(model, seq, tokens=(1, 2, 3), *, loss="cross_entropy", forward_only=False, num_rows=1):
    message = binary_messages.message_class("ForwardBackwardRequest")(
        model_id=model, seq_id=seq, loss_fn=loss, forward_only=forward_only
    )
    for _ in range(num_rows):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
        for name, values in {
            "target_tokens": np.asarray(tokens, np.int64),
            "weights": np.ones(len(tokens), np.float32),
        }.items():
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = values.tobytes(), 2 if values.dtype == np.int64 else 1
            tensor.shape.extend(values.shape)
    return message


def loss_json(model, seq, tokens=(1, 2, 3), key="forward_backward_input"):
    inputs = {
        "target_tokens": {"data": list(tokens), "dtype": "int64", "shape": [len(tokens)]},
        "weights": {"data": [1.0] * len(tokens), "dtype": "float32", "shape": [len(tokens)]},
    }
    chunk = {"type": "encoded_text", "tokens": list(tokens)}
    data = [{"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs}]
    return {"model_id": model, "seq_id": seq, key: {"data": data, "loss_fn": "cross_entropy"}}
