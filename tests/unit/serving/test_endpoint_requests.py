"""Requests to an endpoint: their order and answers, what happens when processes die, and who may see them."""

import os
import signal

import numpy as np
import pytest
import zstandard

from ringmaster.errors import InputError
from ringmaster.features.endpoint.server import binary_messages
from ringmaster.features.endpoint.server.endpoint_file import BaseEntry
from ringmaster.features.endpoint.server.endpoint_server import EndpointServer
from ringmaster.features.endpoint.server.replicas import CPU
from tests.unit.serving.clients import BINARY, entry_of, eventually, loss_json, loss_message, process_link, running


def held(endpoint, client, model):
    """A loss that is being computed until `let_go`."""
    request = client.loss(model, 1, tokens=(777, 1))
    assert eventually(lambda: ["compute", [model]] in endpoint.calls())
    return request


def let_go(endpoint, model):
    (folder,) = endpoint.folder.glob("bases/*")
    (folder / f"{model.replace(':', '-')}.go").touch()


def values(client, model, seq):
    """The logprobs of a forward."""
    answer = client.result(client.loss(model, seq, forward_only=True))
    return answer["loss_fn_outputs"][0]["logprobs"]["data"]


def test_both_forms_of_a_message_have_one_answer(client):
    session = client.session()
    one, other = (client.model(session, number) for number in range(2))
    in_binary = client.result(client.loss(one, 1))
    in_json = client.result(client.post("forward_backward", loss_json(other, 1)))
    assert in_binary == in_json
    forward = client.result(client.post("forward", loss_json(other, 2, key="forward_input")))
    assert forward["metrics"] == in_json["metrics"]


def test_the_answer_in_binary_has_the_bits_of_that_in_json(client):
    model = client.model()
    request = client.loss(model, 1, num_rows=2)
    plain = client.result(request)
    headers = {"Accept": binary_messages.CONTENT_TYPE}
    answer = client.http.post("retrieve_future", json={"request_id": request["request_id"]}, headers=headers)
    message = binary_messages.message_class("ForwardBackwardOutput").FromString(answer.content)
    record = message.loss_fn_outputs[0]
    logprobs = np.frombuffer(record.fields["logprobs"].data, np.float32)
    assert [*np.frombuffer(record.fields["logprobs"].offsets, np.int64)] == [0, 12, 24]
    assert record.num_datums == 2
    assert logprobs[3:].tolist() == plain["loss_fn_outputs"][1]["logprobs"]["data"]
    assert dict(message.metrics) == plain["metrics"]


def test_a_repeated_request_is_computed_once(served_endpoint, client):
    model = client.model()
    first = client.loss(model, 1)
    again = client.loss(model, 1)
    assert first == again
    before = client.result(first)
    step = client.result(client.step(model, 2))
    client.loss(model, 1)
    assert client.result(again) == before
    assert client.result(client.step(model, 2)) == step
    assert sum(model in clients for call, clients in served_endpoint.calls() if call == "compute") == 1
    assert sum(model in clients for call, clients in served_endpoint.calls() if call == "step") == 1
    assert "other content" in client.loss(model, 1, tokens=(9,), status=400)["detail"]


def test_requests_are_computed_in_the_order_of_their_numbers(client):
    model = client.model()
    step = client.step(model, 2)
    loss = client.loss(model, 1)
    client.result(step)
    client.result(loss)
    assert values(client, model, 3) == pytest.approx([-0.001 * x * (1 - 0.1 * 0.006) for x in (1, 2, 3)])


def test_requests_that_wait_together_are_computed_together(served_endpoint, client):
    session = client.session()
    models = [client.model(session, number) for number in range(4)]
    slow = held(served_endpoint, client, models[0])  # the others come while this is computed
    others = [client.loss(model, 1) for model in models[1:]]
    let_go(served_endpoint, models[0])
    for request in [slow, *others]:
        client.result(request)
    together = [set(clients) for call, clients in served_endpoint.calls() if call == "compute"]
    assert set(models[1:]) in together


def test_a_refused_message_holds_up_no_later_one(client):
    model = client.model()
    assert "seq_len" in client.loss(model, 1, tokens=range(100), status=400)["detail"]
    client.step(model, 2, learning_rate=-1, status=422)
    client.result(client.loss(model, 3))


def test_a_corrected_message_takes_the_place_of_a_refused_one(client):
    model = client.model()
    client.loss(model, 1, tokens=range(100), status=400)
    client.result(client.loss(model, 1))


def test_a_loss_that_is_not_served_is_refused_by_name(client):
    model = client.model()
    answer = client.result(client.loss(model, 1, loss="gspo"))
    assert answer["category"] == "user" and "'gspo'" in answer["error"]


def test_without_a_key_nothing_is_answered(served_endpoint, client):
    for key in ("", "tml-other", "\xe4"):
        assert client.http.get("healthz", headers={"X-API-Key": key.encode("latin-1")}).status_code == 401
    assert client.http.get("healthz").json() == {"status": "ok"}


def test_another_owner_sees_and_changes_nothing(served_endpoint, client):
    model = client.model()
    saved = client.result(client.post("save_weights", {"model_id": model, "seq_id": 1, "path": "mine"}))["path"]
    other = served_endpoint.client("bob")
    request = {"request_id": client.loss(model, 2)["request_id"]}
    session = model.partition(":")[0]
    for path, body in {
        "get_info": {"model_id": model},
        "retrieve_future": request,
        "cancel_future": request,
        "weights_info": {"tinker_path": saved},
        "session_heartbeat": {"session_id": session},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"},
        "unload_model": {"model_id": model},
        f"sessions/{session}/finish": {},
    }.items():
        other.post(path, body, status=404)
    other.loss(model, 3, status=404)
    other.step(model, 3, status=404)
    theirs = other.model()
    load = {"model_id": theirs, "seq_id": 1, "path": saved, "optimizer": False}
    other.post("load_weights", load, status=404)
    own = other.session()
    path = {"session_id": own, "sampling_session_seq_id": 0, "model_path": saved}
    other.post("create_sampling_session", path, status=404)
    assert client.result(client.loss(model, 3))["metrics"]


def test_what_is_asked_beyond_the_bounds_is_refused_with_the_bound(client):
    assert "32" in client.model(rank=33, status=400)["detail"]
    session = client.session()
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = client.post("create_sampling_session", sampler)["sampling_session_id"]
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1] * 64}]}}
    assert "63" in client.post("asample", body | {"sampling_params": {}}, status=400)["detail"]
    body["prompt"] = {"chunks": [{"tokens": [1]}]}
    params = {"sampling_params": {"max_tokens": 1}}
    for name, value in {"topk_sample_logprobs": 65, "record_stability_info": True, "prompt_alt_tokens_k": -1}.items():
        assert name in client.post("asample", body | params | {name: value}, status=422)["detail"]
    assert client.http.post("forward_backward", content=b"x" * 33_000_000, headers=BINARY).status_code == 413


def test_samples_have_what_was_asked_of_the_prompt(client):
    session = client.session()
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = client.post("create_sampling_session", sampler)["sampling_session_id"]
    body = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [1, 2, 3, 4]}]},
        "prompt_logprobs": True,
        "prompt_logprobs_last_n": 2,
        "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 1,
        "prompt_alt_tokens_k": 2,
        "target_prompt_logprobs": {
            "data": [4, 8],
            "dtype": "int64",
            "shape": [3, 2],
            "sparse_crow_indices": [0, 1, 1, 2],
            "sparse_col_indices": [1, 0],
        },
        "num_samples": 2,
        "sampling_params": {"max_tokens": 2, "stop": ["a"], "seed": 1},
    }
    request = client.post("asample", body)
    assert len(set(request["sample_sequence_ids"])) == 2
    plain = client.result(request)
    assert plain["prompt_logprobs"] == [None, None, -1.0, -1.0]
    headers = {"Accept": binary_messages.CONTENT_TYPE}
    answer = client.http.post("retrieve_future", json={"request_id": request["request_id"]}, headers=headers)
    message = binary_messages.message_class("SampleResponse").FromString(answer.content)
    assert np.isnan(np.frombuffer(message.prompt_logprobs, np.float32)[:2]).all()
    assert message.topk_prompt_logprobs.k == 2 and message.topk_prompt_logprobs.length == 4
    assert [np.frombuffer(each.tokens, np.int32).tolist() for each in message.sequences] == [[5, 6], [5, 6]]
    assert [each.topk_sampled_logprobs.k for each in message.sequences] == [1, 1]
    drawn = message.prompt_alt_tokens
    assert np.frombuffer(drawn.tokens.dense, np.int64).tolist() == [4] * 6 and [*drawn.logprobs.shape] == [3, 2]
    targets = message.target_prompt_logprobs
    assert np.frombuffer(targets.sparse_csr.values, np.float32).tolist() == [-1.0, -2.0]
    assert np.frombuffer(targets.sparse_csr.crow_indices, np.int64).tolist() == [0, 1, 1, 2]
    assert [*targets.shape] == [3, 2]
    dense = body | {"seq_id": 1, "target_prompt_logprobs": {"data": [4, -1] * 3, "dtype": "int64", "shape": [3, 2]}}
    answer = client.result(client.post("asample", dense))["target_prompt_logprobs"]
    assert answer == {"data": [-1.0, 0.0] * 3, "dtype": "float32", "shape": [3, 2]}


def test_a_checkpoint_goes_on_with_and_without_the_optimizer(served_endpoint, client):
    model = client.model()
    client.loss(model, 1)
    client.step(model, 2)
    save = {"model_id": model, "seq_id": 3, "path": "a"}
    path = client.result(client.post("save_weights", save))["path"]
    assert path == f"tinker://{model}/weights/a"
    assert client.post("save_weights", save | {"seq_id": 4}, status=400)["detail"].startswith("there is a checkpoint")
    client.result(client.post("save_weights", save | {"seq_id": 4, "overwrite": True}))
    now = values(client, model, 5)
    client.loss(model, 6)
    client.step(model, 7)
    assert values(client, model, 8) != now
    client.result(client.post("load_weights", {"model_id": model, "seq_id": 9, "path": path, "optimizer": True}))
    assert values(client, model, 10) == now
    info = client.post("weights_info", {"tinker_path": path})
    assert info["base_model"] == "tiny" and info["lora_rank"] == 4
    sampler = {"model_id": model, "seq_id": 11, "path": "b"}
    without = client.result(client.post("save_weights_for_sampler", sampler))["path"]
    other = {"session_id": model.partition(":")[0], "model_seq_id": 7, "path": without, "optimizer": True}
    assert "no state of the optimizer" in client.result(client.post("load_weights", other))["error"]
    assert served_endpoint.server.store.client(f"{model.partition(':')[0]}:train:7").is_ended  # its place is free


def test_who_ended_has_a_checkpoint_and_its_place_is_free(tmp_path):
    with running(tmp_path, max_adapters=1) as endpoint:
        client = endpoint.client()
        session = client.session()
        model = client.model(session)
        assert "max_adapters" in client.model(session, 1, status=403)["detail"]
        client.loss(model, 1)
        client.result(client.step(model, 2))
        client.result(client.post("unload_model", {"model_id": model}))
        path = f"tinker://{model}/weights/_final"
        assert path in client.loss(model, 3, status=410)["detail"]
        body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
        assert client.result(client.post("load_weights", body))["model_id"] == f"{session}:train:1"
        client.post(f"sessions/{session}/finish", {})
        client.post("session_heartbeat", {"session_id": session}, status=410)


def trained(client, model, *, kill=lambda: None):
    """What a client has after two steps, with two answered losses when something is killed."""
    client.loss(model, 1)
    client.result(client.step(model, 2))
    client.result(client.loss(model, 3))
    client.result(client.loss(model, 4, tokens=(5, 6)))
    kill()
    client.result(client.step(model, 5))
    return values(client, model, 6)


def test_a_killed_process_goes_on_where_it_was(served_endpoint, client):
    assert trained(client, client.model(), kill=served_endpoint.links[0].kill) == trained(client, client.model())


@pytest.mark.full
def test_a_process_that_is_killed_by_a_signal_goes_on_where_it_was(tmp_path):
    with running(tmp_path, link_of=process_link) as endpoint:
        client = endpoint.client()
        plain = trained(client, client.model())
        pid = endpoint.links[0].pid
        assert trained(client, client.model(), kill=lambda: os.kill(pid, signal.SIGKILL)) == plain
        assert endpoint.links[0].pid != pid


def test_a_step_that_was_on_disk_before_the_process_died_is_not_done_again(client):
    model = client.model()
    client.loss(model, 1)
    client.result(client.step(model, 2))
    client.loss(model, 3)
    answer = client.result(client.step(model, 4, weight_decay=0.666))
    assert answer["metrics"] == {"grad_norm": 1.0}
    value = values(client, model, 5)[0]
    first = 1 - 0.1 * 0.006
    assert value == pytest.approx(-0.001 * (first - 0.1 * 0.006 * first))


def test_the_gradients_of_such_a_step_are_not_used_again(client):
    values_after = []
    for weight_decay in (0.0, 0.666):
        model = client.model()
        client.loss(model, 1)
        client.result(client.step(model, 2))
        client.loss(model, 3)
        client.result(client.step(model, 4, weight_decay=weight_decay))
        client.loss(model, 5)
        client.result(client.step(model, 6))
        values_after.append(values(client, model, 7))
    assert values_after[0] == values_after[1]


def test_a_request_that_kills_the_process_fails_and_the_others_do_not(served_endpoint, client):
    session = client.session()
    models = [client.model(session, number) for number in range(3)]
    deadly = client.loss(models[0], 1, tokens=(666, 1))
    others = [client.loss(model, 1) for model in models[1:]]
    assert "has died" in client.result(deadly)["error"]
    assert all(client.result(each)["metrics"] for each in others)


def test_gradients_that_a_refused_step_dropped_stay_dropped_after_a_kill(served_endpoint, client):
    plain, model = client.model(), client.model()
    client.loss(model, 1, tokens=(7, 8))
    assert "not finite" in client.result(client.step(model, 2, weight_decay=0.555))["error"]
    client.result(client.loss(plain, 1))
    served_endpoint.links[0].kill()
    client.loss(model, 3)
    client.result(client.step(model, 4))
    client.result(client.step(plain, 2))
    assert values(client, model, 5) == values(client, plain, 3)


def test_a_loss_that_is_refused_behind_its_first_piece_adds_no_gradients(client, monkeypatch):
    monkeypatch.setattr("ringmaster.features.endpoint.server.pending_request.PIECE_TOKENS", 1)  # a piece for each row
    values_after = []
    for is_refused in (False, True):
        model = client.model()
        client.loss(model, 1)
        if is_refused:
            message = loss_message(model, 2, num_rows=2)
            message.data.append(loss_message(model, 2, (555, 1)).data[0])
            request = client.post("forward_backward", content=message.SerializeToString(), headers=BINARY)
            assert "is refused" in client.result(request)["error"]
        client.loss(model, 3 if is_refused else 2)
        client.result(client.step(model, 4 if is_refused else 3))
        values_after.append(values(client, model, 5 if is_refused else 4))
    assert values_after[0] == values_after[1]


def test_a_new_server_answers_what_the_last_one_was_asked(tmp_path):
    with running(tmp_path) as endpoint:
        client, url, keys = endpoint.client(), endpoint.served.url, endpoint.served.keys
        model = client.model()
        client.loss(model, 1)
        done = client.step(model, 2)
        before = client.result(done)
        client.loss(model, 3)
        held = client.step(model, 5)  # waits for 4
    with running(tmp_path) as endpoint:
        assert (endpoint.served.url, endpoint.served.keys) == (url, keys)
        client = endpoint.client()
        assert client.result(done) == before
        client.loss(model, 3)
        client.loss(model, 4)
        client.result(held)
        with_gradients = [clients for call, clients in endpoint.calls() if call == "step"]
        assert with_gradients == [[model], [model]]
        value = values(client, model, 6)[0]
    first = 1 - 0.1 * 0.006
    assert value == pytest.approx(-0.001 * (first - 0.1 * 2 * 0.006 * first))


def test_one_process_serves_an_endpoint(tmp_path):
    with running(tmp_path) as endpoint:
        with pytest.raises(InputError, match="is served already"):
            EndpointServer(entry_of(), home=tmp_path, devices=[CPU]).run(print)
        assert endpoint.thread.is_alive()


def test_an_idle_endpoint_ends_and_its_clients_are_checkpoints(tmp_path):
    with running(tmp_path, idle_s=1.0) as endpoint:
        client = endpoint.client()
        model = client.model()
        client.loss(model, 1)
        client.result(client.step(model, 2))
        endpoint.thread.join()
        assert endpoint.result == [True]
    assert [*endpoint.folder.rglob("weights-_final/state.json")]


def test_a_client_without_a_sign_of_life_ends(tmp_path):
    with running(tmp_path, client_timeout_s=0.1) as endpoint:
        client = endpoint.client()
        model = client.model()
        client.loss(model, 1)
        store = endpoint.server.store
        assert eventually(lambda: store.client(model).is_ended)


def test_a_base_that_cannot_be_served_is_refused_with_the_reason(tmp_path):
    broken = BaseEntry.model_construct(name="tiny", from_pretrained="broken")
    with pytest.raises(AssertionError, match="the base is broken"), running(tmp_path, bases=[broken]):
        pass


def test_waiting_samples_can_be_cancelled(served_endpoint, client):
    session = client.session()
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = client.post("create_sampling_session", sampler)["sampling_session_id"]
    model = client.model(session)
    slow = held(served_endpoint, client, model)
    body = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}}
    request = client.post("asample", body | {"seq_id": 0})
    client.post("cancel_future", request | {"x": 1})
    let_go(served_endpoint, model)
    assert "cancelled" in client.result(request)["error"]
    client.result(slow)


def test_what_joining_costs_is_told(client):
    price = client.post("price", {"base_model": "tiny", "rank": 3})
    assert price == {"step_s_now": 0.1, "step_s_after": 0.2, "memory_bytes_after": 3, "memory_bytes_limit": 1000}


def test_messages_that_nobody_knows_are_refused(client):
    assert client.http.post("no_such").status_code == 404
    assert client.http.post("asample", content=b"{").status_code == 400
    assert client.http.post("asample", content=b"[" * 100_000).status_code == 400
    assert client.http.post("forward_backward", content=b"\xff", headers=BINARY).status_code == 400
    headers = BINARY | {"Content-Encoding": "zstd"}
    assert client.http.post("forward_backward", content=b"x", headers=headers).status_code == 400


def test_compressed_messages_are_read(client):
    model = client.model()
    content = zstandard.ZstdCompressor().compress(loss_message(model, 1).SerializeToString())
    headers = BINARY | {"Content-Encoding": "zstd"}
    assert client.result(client.post("forward_backward", content=content, headers=headers))["metrics"]


def test_samples_that_wait_together_are_computed_together(served_endpoint, client):
    session = client.session()
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = client.post("create_sampling_session", sampler)["sampling_session_id"]
    model = client.model(session)
    slow = held(served_endpoint, client, model)  # the samples come while this is computed
    body = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}}
    requests = [client.post("asample", body | {"seq_id": seq}) for seq in range(3)]
    let_go(served_endpoint, model)
    for request in [slow, *requests]:
        client.result(request)
    assert max(len(each) for call, each in served_endpoint.calls() if call == "sample") == 3


def test_a_checkpoint_that_has_expired_is_gone(served_endpoint, client):
    model = client.model()
    save = {"model_id": model, "seq_id": 1, "path": "brief", "ttl_seconds": 1}
    path = client.result(client.post("save_weights", save))["path"]
    (folder,) = served_endpoint.folder.rglob(f"{model.replace(':', '-')}/weights-brief")
    assert eventually(lambda: not folder.exists())
    client.post("weights_info", {"tinker_path": path}, status=404)


def test_a_base_that_is_served_no_more_is_refused_until_it_is_served_again(tmp_path):
    with running(tmp_path) as endpoint:
        client = endpoint.client()
        model = client.model()
        client.loss(model, 1)
    other = BaseEntry.model_construct(name="other", from_pretrained="base")
    with running(tmp_path, bases=[other]) as endpoint:
        client = endpoint.client()
        assert "The bases are other" in client.loss(model, 2, status=400)["detail"]
        client.post(f"sessions/{model.partition(':')[0]}/finish", {})
    with running(tmp_path) as endpoint:
        client = endpoint.client()
        assert eventually(lambda: endpoint.server.store.client(model).is_ended)
        assert "has ended" in client.loss(model, 2, status=410)["detail"]


def sampler_of(client):
    sampler = {"session_id": client.session(), "sampling_session_seq_id": 0, "base_model": "tiny"}
    return client.post("create_sampling_session", sampler)["sampling_session_id"]


def sample(client, sampler, seq, tokens, *, max_tokens):
    body = {"sampling_session_id": sampler, "seq_id": seq, "prompt": {"chunks": [{"tokens": tokens}]}}
    return client.post("asample", body | {"sampling_params": {"max_tokens": max_tokens}})


def test_a_long_sample_keeps_no_other_request_waiting_longer_than_one_turn(served_endpoint, client):
    model, sampler = client.model(), sampler_of(client)
    slow = held(served_endpoint, client, model)
    long = sample(client, sampler, 0, [888], max_tokens=60)
    short = sample(client, sampler_of(client), 0, [1], max_tokens=1)
    before = len(served_endpoint.calls())
    let_go(served_endpoint, model)
    client.result(short)
    calls = served_endpoint.calls()[before:]
    client.result(long)
    client.result(slow)
    assert [len(each) for call, each in calls if call == "sample"][:1] == [2]
    turns = [call for call, _ in served_endpoint.calls()[before:]]
    assert turns.count("sample") >= 4


def test_a_sample_that_has_begun_can_be_cancelled(served_endpoint, client, monkeypatch):
    monkeypatch.setattr("tests.unit.serving.fake_endpoint.FakeEndpoint._turn", lambda *_: None)
    request = sample(client, sampler_of(client), 0, [888], max_tokens=60)
    before = len(served_endpoint.calls())
    assert eventually(lambda: ["sample", ["None"]] in served_endpoint.calls()[before:])
    client.post("cancel_future", request)
    assert "cancelled" in client.result(request)["error"]
    assert eventually(lambda: served_endpoint.calls()[-1] == ["sample", []])
    assert not served_endpoint.server._schedulers["tiny"]._cancelled


def test_tensors_of_several_targets_and_sparse_ones_are_read(client):
    model = client.model()
    message = loss_json(model, 1)
    (datum,) = message["forward_backward_input"]["data"]
    sparse = {"shape": [3, 2], "sparse_crow_indices": [0, 1, 1, 3], "sparse_col_indices": [1, 0, 1]}
    datum["loss_fn_inputs"] = {
        "target_tokens": {"data": [5, 6, 7], "dtype": "int64", **sparse},
        "weights": {"data": [1.0, 2.0, 3.0], "dtype": "float32", **sparse},
    }
    client.post("forward_backward", message)
    assert "element" in refused_sparse(client, model, shape=[3, 2**40])
    assert "row pointers" in refused_sparse(client, model, sparse_crow_indices=[0, 1, 1, 9])
    assert "columns" in refused_sparse(client, model, sparse_col_indices=[1, 0, 2])


def refused_sparse(client, model, **change):
    message = loss_json(model, 2)
    (datum,) = message["forward_backward_input"]["data"]
    sparse = {"shape": [3, 2], "sparse_crow_indices": [0, 1, 1, 3], "sparse_col_indices": [1, 0, 1], **change}
    datum["loss_fn_inputs"]["weights"] = {"data": [1.0, 2.0, 3.0], "dtype": "float32", **sparse}
    return client.post("forward_backward", message, status=400)["detail"]
