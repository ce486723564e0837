"""What an endpoint keeps of its clients: sessions, refused messages, answers and checkpoints."""

import asyncio
import os
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringmaster.features.endpoint.server import endpoint_service
from ringmaster.features.endpoint.server.compute_link import (
    CallFailed,
    ComputeLink,
    ComputeProcessDied,
    ComputeSettings,
    child_environment,
)
from ringmaster.features.endpoint.server.endpoint_file import BaseEntry
from ringmaster.features.endpoint.server.endpoint_server import EndpointServer
from ringmaster.features.endpoint.server.endpoint_service import EndpointService
from ringmaster.features.endpoint.server.recording import record_clients
from ringmaster.features.endpoint.server.replicas import CPU
from ringmaster.features.endpoint.server.store import (
    ClientCheckpoint,
    EndpointRequestKind,
    EndpointStore,
    StoredRequest,
)
from tests.unit.serving.clients import BINARY, LinkInProcess, entry_of, eventually, loss_message, running
from tests.unit.serving.fake_endpoint import FakeEndpoint


def test_a_client_with_a_name_needs_an_open_session_of_its_owner(served_endpoint, client):
    named = {"user_metadata": {"name": "one"}}
    model = client.model(**named)
    session = model.partition(":")[0]
    path = client.result(client.post("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))["path"]
    load = {"model_seq_id": 2, "path": path, "optimizer": False, **named}
    client.model("unknown", status=404, **named)
    client.post("load_weights", load | {"session_id": "unknown"}, status=404)
    served_endpoint.client("bob").model(session, 1, status=404, **named)
    client.post(f"sessions/{session}/finish", {})
    client.model(session, 1, status=410, **named)
    client.post("load_weights", load | {"session_id": session}, status=410)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda datum: datum.model_input.add(), "a chunk of nothing"),
        (lambda datum: setattr(datum.loss_fn_inputs["weights"], "dtype", 9), "element type 9"),
        (lambda datum: datum.loss_fn_inputs["weights"].shape.append(7), "cannot reshape"),
    ],
)
def test_a_binary_message_that_cannot_be_read_holds_up_no_later_one(client, change, reason):
    model = client.model()
    message = loss_message(model, 1)
    change(message.data[0])
    answer = client.post("forward_backward", content=message.SerializeToString(), headers=BINARY, status=400)
    assert reason in answer["detail"]
    assert (
        client.http.post("retrieve_future", json={"request_id": client.loss(model, 2)["request_id"]}).status_code == 200
    )


def test_clients_that_share_a_sampler_keep_their_answers(client):
    sampler = {"session_id": client.session(), "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = client.post("create_sampling_session", sampler)["sampling_session_id"]
    prompt = {"chunks": [{"tokens": [1]}]}
    body = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
    counters = [client.post("join_sampling_session", {"sampling_session_id": sampler})["client_counter"] for _ in "ab"]
    firsts = [0, *(1_000_000_000 * counter for counter in counters)]  # as the client numbers what it asks
    requests = [client.post("asample", body | {"seq_id": seq + i}) for i in range(2) for seq in firsts]
    answers = [client.result(request) for request in requests]
    assert [client.result(request) for request in requests] == answers


def test_the_time_without_a_sign_of_life_begins_when_signs_can_be_given(tmp_path, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(endpoint_service, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    with closing(EndpointStore(tmp_path / "endpoint.sqlite")) as store:
        store.add_session("s", owner="ann", name="", metadata={})
        service = EndpointService(entry_of().serve, store)

        async def run():
            now_s[0] += 1000  # the bases were loaded
            service.attach(asyncio.get_running_loop())
            assert service.expired_sessions() == [] and service.active_s == now_s[0]
            now_s[0] += 1000  # the request was computed
            service.on_answer(request_of("s:train:0", 1))
            await asyncio.sleep(0)
            assert service.active_s == now_s[0] and service.expired_sessions() == ["s"]

        asyncio.run(run())


def request_of(model, seq):
    options = {"owner": "ann", "base": "tiny", "kind": EndpointRequestKind.STEP, "work": {"learning_rate": 0.1}}
    return StoredRequest(id=f"{model}:{seq}", stream=model, seq=seq, **options)


class LinkThatFails(LinkInProcess):
    def start(self):
        raise CallFailed("no memory is left")


def test_what_waits_outlives_a_start_that_fails(tmp_path):
    with running(tmp_path) as endpoint:
        model = endpoint.client().model()
    waiting = request_of(model, 1)
    with closing(EndpointStore(endpoint.folder / "endpoint.sqlite")) as store:
        store.add(waiting)
    with pytest.raises(AssertionError, match="no memory is left"), running(tmp_path, link_of=LinkThatFails):
        pass
    with running(tmp_path) as endpoint:
        assert endpoint.client().result({"request_id": waiting.id})["metrics"] == {"grad_norm": 1.0}


def test_a_client_whose_end_failed_can_end_again(served_endpoint, client):
    model = client.model()
    client.loss(model, 1)
    client.result(client.step(model, 2))
    (state,) = served_endpoint.folder.rglob(f"{model.replace(':', '-')}.state")
    in_the_way = state.parent / "checkpoints" / state.stem
    in_the_way.parent.mkdir(exist_ok=True)
    in_the_way.touch()
    assert "error" in client.result(client.post("unload_model", {"model_id": model}))
    in_the_way.unlink()
    answer = client.result(client.post("unload_model", {"model_id": model}))
    assert answer == {"type": "unload_model", "model_id": model}
    assert client.result(client.post("unload_model", {"model_id": model})) == answer


def test_a_checkpoint_in_place_of_an_expired_one_stays(tmp_path, monkeypatch):
    written = FakeEndpoint.save

    def expired_meanwhile(self, client, name, **options):
        folder = written(self, client, name, **options)
        with endpoint.server.store.changes() as db:
            db.execute("UPDATE checkpoints SET expires_s = 0 WHERE expires_s IS NOT NULL")
        endpoint.server.store.drop_expired()
        return folder

    monkeypatch.setattr(FakeEndpoint, "save", expired_meanwhile)
    with running(tmp_path) as endpoint:
        client = endpoint.client()
        save = {"model_id": client.model(), "path": "a", "ttl_seconds": 10_000, "overwrite": True}
        for seq in (1, 2):
            client.result(client.post("save_weights", save | {"seq_id": seq}))
        assert [*endpoint.folder.rglob("weights-a/state.json")]


def test_unnamed_checkpoints_and_those_being_written_have_names_that_no_client_takes(served_endpoint, client):
    model = client.model()
    save = {"model_id": model, "seq_id": 1, "path": "snapshot-2"}
    named = client.result(client.post("save_weights_for_sampler", save))["path"]
    client.result(
        client.post("save_weights_for_sampler", {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 0})
    )
    assert not served_endpoint.server.store.checkpoint(named, owner="ann").is_snapshot
    client.post("save_weights", {"model_id": model, "seq_id": 3, "path": "a.tmp"}, status=400)
    client.result(client.post("save_weights", {"model_id": model, "seq_id": 4, "path": "a"}))


def test_the_newest_checkpoint_is_the_last_one_also_where_the_clock_was_set_back(tmp_path):
    values = {"owner": "ann", "model": "m", "base": "tiny", "folder": tmp_path, "spec": {}, "step": 1}
    with closing(EndpointStore(tmp_path / "endpoint.sqlite")) as store:
        for uri, created_s in (("one", 2.0), ("two", 1.0)):
            store.add_checkpoint(
                ClientCheckpoint(uri=uri, created_s=created_s, expires_s=None, is_snapshot=True, **values)
            )
        assert [each.uri for each in store.checkpoints(where="model = ?", values=("m",))] == ["two", "one"]


@pytest.mark.parametrize(
    ("served", "reason"),
    [([("a/b", "other")], "are of the base a/b, base"), ([("a--b", "base")], "are of the base a/b")],
)
def test_another_base_in_place_of_one_with_clients_is_refused(tmp_path, served, reason):
    bases = [BaseEntry.model_construct(name=name, from_pretrained=path) for name, path in [("a/b", "base"), *served]]
    with running(tmp_path, bases=bases[:1]):
        pass
    with pytest.raises(AssertionError, match=reason), running(tmp_path, bases=bases[1:]):
        pass
    with running(tmp_path, bases=bases[:1]):
        pass


def test_clients_of_a_base_that_is_served_no_more_are_recorded_later(tmp_path):
    with closing(EndpointStore(tmp_path / "endpoint.sqlite")) as store:
        store.add_client("m", owner="ann", session="s", base="tiny", name="one", spec={}, step=1)
        store.end_client("m")
        assert record_clients(None, store, endpoint="e", bases={}) == []
        assert [client.id for client in store.clients(where="is_ended AND NOT is_recorded")] == ["m"]


def test_losses_without_a_step_have_a_bound_and_a_step_frees_it(client, monkeypatch):
    model = client.model()
    client.result(client.loss(model, 1))
    monkeypatch.setattr(endpoint_service, "MAX_PENDING_BYTES", 500)
    assert "To fix: take a step" in client.loss(model, 2, status=400)["detail"]
    client.result(client.step(model, 3))
    client.result(client.loss(model, 4))


def test_what_waits_and_the_sessions_of_one_owner_are_no_bound_for_another(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint_service, "MAX_SESSIONS", 1)
    monkeypatch.setattr(endpoint_service, "MAX_WAITING_BYTES", 500)
    with running(tmp_path, owners=["ann", "bob"]) as endpoint:
        ann, bob = (endpoint.client(owner) for owner in ("ann", "bob"))
        models = [each.model() for each in (ann, bob)]
        ann.post("create_session", {}, status=429)
        ann.loss(models[0], 2)  # waits for the request 1
        ann.loss(models[0], 3, status=429)
        bob.loss(models[1], 2)


def test_what_was_answered_before_the_server_listens_waits_no_more(tmp_path, monkeypatch):
    with running(tmp_path) as endpoint:
        model = endpoint.client().model()
    with closing(EndpointStore(endpoint.folder / "endpoint.sqlite")) as store:
        store.add(request_of(model, 1))
    monkeypatch.setattr(endpoint_service, "MAX_WAITING", 1)
    with running(tmp_path) as endpoint:
        client = endpoint.client()
        client.result({"request_id": f"{model}:1"})
        client.result(client.loss(model, 2))


def test_refused_messages_are_noted_until_a_later_one_is_answered(served_endpoint, client, monkeypatch):
    monkeypatch.setattr(endpoint_service, "MAX_REFUSED", 2)
    model, store = client.model(), served_endpoint.server.store
    for seq in (1, 2, 3):
        assert "loss_fn has" in client.loss(model, seq, loss="x" * 201, status=400)["detail"]
    assert store.num_refused(model) == 2
    client.result(client.loss(model, 3, loss="gspo"))
    assert store.num_refused(model) == 0 and store.client(model).losses == ()
    client.result(client.loss(model, 4))
    assert store.client(model).losses == ("cross_entropy",)


def test_the_last_checkpoint_of_a_client_takes_the_place_of_none_that_it_saved(served_endpoint, client):
    session = client.session()
    model = client.model(session)
    saved = client.result(client.post("save_weights", {"model_id": model, "seq_id": 1, "path": "final"}))["path"]
    client.loss(model, 2)
    client.result(client.step(model, 3))
    client.result(client.post("unload_model", {"model_id": model}))
    last = f"tinker://{model}/weights/_final"
    steps = [served_endpoint.server.store.checkpoint(uri, owner="ann").step for uri in (saved, last)]
    assert steps == [0, 1]
    client.post("save_weights", {"model_id": client.model(session, 1), "seq_id": 1, "path": "_final"}, status=422)


class LinkThatLoads(LinkInProcess):
    """Loads its base until it is killed."""

    def __init__(self, settings, loads):
        super().__init__(settings)
        self._loads, self._kill = loads, threading.Event()

    def start(self):
        self._loads.set()
        self._kill.wait()
        raise ComputeProcessDied("it was killed")

    def kill(self):
        self._kill.set()


def test_an_endpoint_ends_while_a_base_is_being_loaded(tmp_path):
    loads = threading.Event()
    bases = [BaseEntry.model_construct(name=name, from_pretrained="base") for name in ("one", "two")]
    server = EndpointServer(
        entry_of(bases=bases), home=tmp_path, devices=[CPU], link_of=lambda settings: LinkThatLoads(settings, loads)
    )
    announced, results = [], []
    thread = threading.Thread(target=lambda: results.append(server.run(announced.append)))
    thread.start()
    assert loads.wait(60)
    server.end()
    thread.join(60)
    assert results == [False] and not announced


def test_a_link_that_was_killed_before_its_process_started_starts_none(tmp_path):
    link = ComputeLink(ComputeSettings(base="base", limits={}, folder=tmp_path))
    link.kill()
    with pytest.raises(ComputeProcessDied, match="before its start"):
        link.start()
    assert link.pid is None


def test_the_processes_of_an_endpoint_find_the_package_and_none_of_its_modules_at_the_top():
    paths = [Path(path) for path in child_environment()["PYTHONPATH"].split(os.pathsep)]
    assert any((path / "ringmaster" / "errors.py").exists() for path in paths)
    assert not [path for path in paths if (path / "features" / "endpoint").exists()]


def test_reading_a_store_drops_nothing(tmp_path):
    file = tmp_path / "endpoint.sqlite"
    with closing(EndpointStore(file)) as store:
        store.add_session("s", owner="ann", name="", metadata={})
        store.add_client("m", owner="ann", session="s", base="tiny", name="one", spec={})
        store.add(request_of("m", 1))
        store.finish(request_of("m", 1), {"metrics": {}})
        store.finish_session("s")
        with closing(EndpointStore(file)) as other:  # as the process that records
            assert other.request("m:1", owner="ann")
        assert store.request("m:1", owner="ann")
        store.drop_ended()
        assert store.request("m:1", owner="ann") is None


def test_clients_that_end_while_others_are_recorded_are_recorded_then(tmp_path):
    with running(tmp_path) as endpoint:
        starts, is_busy, client = [], threading.Event(), endpoint.client()

        def record():
            starts.append(is_busy.is_set())
            return not is_busy.is_set()

        endpoint.server._record = record
        is_busy.set()
        model = client.model()
        client.loss(model, 1)
        client.result(client.step(model, 2))
        client.result(client.post("unload_model", {"model_id": model}))
        assert eventually(lambda: True in starts)
        is_busy.clear()
        assert eventually(lambda: False in starts)


def test_limits_with_which_answered_gradients_are_lost_are_refused(tmp_path):
    with running(tmp_path) as endpoint:
        client = endpoint.client()
        model = client.model()
        client.result(client.loss(model, 1, tokens=range(1, 41)))
    with pytest.raises(AssertionError, match="cannot be computed again"), running(tmp_path, seq_len=32):
        pass
    with running(tmp_path) as endpoint:
        client = endpoint.client()
        client.result(client.step(model, 2))
        assert endpoint.server.store.client(model).step == 1
