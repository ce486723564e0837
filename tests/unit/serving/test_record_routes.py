"""What programs see and change of checkpoints, training runs and sessions; what is published, all owners read."""

import json
import sqlite3
from contextlib import closing

import httpx
import pytest

from ringmaster.features.endpoint.server.store import EndpointStore
from tests.unit.serving.fake_endpoint import FakeEndpoint


def save(client, model, seq, name, kind="weights", **options):
    message = {"model_id": model, "seq_id": seq, "path": name, **options}
    paths = {
        "weights": "save_weights",
        "sampler_weights": "save_weights_for_sampler",
        "external_weights": "save_weights_external",
    }
    return client.result(client.post(paths[kind], message))["path"]


def route_of(path):
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    return f"training_runs/{run}/checkpoints/{checkpoint}"


def ask(client, method, path, *, status=200, **options):
    answer = client.http.request(method, path, **options)
    assert answer.status_code == status, (answer.status_code, answer.text)
    return answer.json() if answer.content else None


@pytest.fixture
def other(served_endpoint):
    return served_endpoint.client("bob")


def test_a_published_checkpoint_is_read_by_others_and_changed_by_its_owner_alone(client, other):
    model = client.model()
    path = save(client, model, 1, "a")
    secret = save(client, model, 2, "b")
    route = route_of(path)
    theirs = other.model()
    load = {"model_id": theirs, "path": path, "optimizer": True}
    for method, change in (("POST", "/publish"), ("DELETE", ""), ("DELETE", "/publish"), ("PUT", "/ttl")):
        ask(other, method, route + change, status=404, json={"ttl_seconds": 5000})
    ask(client, "POST", f"{route}/publish", status=204)
    ask(client, "POST", f"{route}/publish", status=409)
    for method, change in (("POST", "/publish"), ("DELETE", ""), ("DELETE", "/publish"), ("PUT", "/ttl")):
        ask(other, method, route + change, status=404, json={"ttl_seconds": 5000})
    assert other.post("weights_info", {"tinker_path": path})["lora_rank"] == 4
    other.result(other.post("load_weights", load | {"seq_id": 1}))
    own = {"session_id": other.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    assert other.result(other.post("load_weights", own))["model_id"]
    sampler = {"session_id": own["session_id"], "sampling_session_seq_id": 0, "model_path": path}
    other.post("create_sampling_session", sampler)
    listed = ask(other, "GET", f"training_runs/{model}/checkpoints")["checkpoints"]
    assert [each["tinker_path"] for each in listed] == [path] and listed[0]["public"]
    ask(other, "GET", f"training_runs/{model}", status=404)
    run = ask(other, "GET", f"training_runs/{model}", params={"access_scope": "accessible"})
    assert run["model_owner"] == "ann" and run["last_checkpoint"]["tinker_path"] == path
    accessible = ask(other, "GET", "training_runs", params={"access_scope": "accessible", "limit": 1000})
    assert model in [each["training_run_id"] for each in accessible["training_runs"]]
    other.post("weights_info", {"tinker_path": secret}, status=404)
    ask(client, "DELETE", f"{route}/publish", status=204)
    ask(client, "DELETE", f"{route}/publish", status=409)
    other.post("load_weights", load | {"seq_id": 2}, status=404)
    ask(other, "GET", f"training_runs/{model}/checkpoints", status=404)


def test_a_checkpoint_that_is_overwritten_is_private_before_its_files_change(client, other, monkeypatch):
    model = client.model()
    path = save(client, model, 1, "a")
    ask(client, "POST", f"{route_of(path)}/publish", status=204)
    seen, written = [], FakeEndpoint.save

    def looked_at(self, *arguments, **options):
        seen.append(other.http.post("weights_info", json={"tinker_path": path}).status_code)
        return written(self, *arguments, **options)

    monkeypatch.setattr(FakeEndpoint, "save", looked_at)
    save(client, model, 2, "a", overwrite=True)
    assert seen == [404]
    other.post("weights_info", {"tinker_path": path}, status=404)


def test_a_deleted_checkpoint_is_gone_with_its_files(served_endpoint, client):
    model = client.model()
    path = save(client, model, 1, "a", user_metadata={"note": "one"})
    folder = served_endpoint.server.store.checkpoint(path, owner="ann").folder
    (listed,) = ask(client, "GET", f"training_runs/{model}/checkpoints")["checkpoints"]
    assert listed["user_metadata"] == {"note": "one"} and listed["size_bytes"] > 0 and listed["expires_at"] is None
    assert folder.is_dir()
    ask(client, "DELETE", route_of(path), status=204)
    ask(client, "DELETE", route_of(path), status=404)
    assert not folder.exists() and not ask(client, "GET", f"training_runs/{model}/checkpoints")["checkpoints"]
    save(client, model, 2, "a")


def test_the_last_checkpoint_of_a_client_stays_until_the_lineage_has_it(served_endpoint, client):
    model = client.model()
    client.loss(model, 1)
    client.result(client.step(model, 2))
    client.result(client.post("unload_model", {"model_id": model}))
    route = f"training_runs/{model}/checkpoints/weights/_final"
    ask(client, "DELETE", route, status=409)
    ask(client, "PUT", f"{route}/ttl", status=409, json={"ttl_seconds": 5})
    served_endpoint.server.store.note_recorded(model)
    ask(client, "DELETE", route, status=204)


def test_when_a_checkpoint_expires_can_be_changed(served_endpoint, client):
    model = client.model()
    path = save(client, model, 1, "a")
    route = f"{route_of(path)}/ttl"
    ask(client, "PUT", route, status=422, json={"ttl_seconds": 0})
    ask(client, "PUT", route, status=422, json={})
    ask(client, "PUT", route, status=204, json={"ttl_seconds": 86_400})
    (listed,) = ask(client, "GET", f"training_runs/{model}/checkpoints")["checkpoints"]
    assert listed["expires_at"] > listed["time"]
    ask(client, "PUT", route, status=204, json={"ttl_seconds": None})
    served_endpoint.server.store.set_expiry(path, 1.0)
    ask(client, "PUT", route, status=404, json={"ttl_seconds": None})
    assert not ask(client, "GET", f"training_runs/{model}/checkpoints")["checkpoints"]


def test_lists_have_pages(served_endpoint):
    client = served_endpoint.client("bob")
    session = client.session(display_name="night")
    models = [client.model(session, number) for number in range(3)]
    paths = [save(client, model, 1, "a") for model in models]
    first = ask(client, "GET", "checkpoints", params={"limit": 2})
    second = ask(client, "GET", "checkpoints", params={"limit": 2, "offset": 2})
    listed = [each["tinker_path"] for each in (*first["checkpoints"], *second["checkpoints"])]
    assert listed[:3] == paths[::-1]
    assert first["cursor"] == {"offset": 0, "limit": 2, "total_count": second["cursor"]["total_count"]}
    runs = ask(client, "GET", "training_runs", params={"limit": 3})
    assert [each["training_run_id"] for each in runs["training_runs"]] == models[::-1]
    assert ask(client, "GET", "sessions", params={"limit": 1}) == {"sessions": [session]}
    assert ask(client, "GET", f"sessions/{session}") == {
        "training_run_ids": models,
        "sampler_ids": [],
        "display_name": "night",
    }
    for query in ({"limit": 0}, {"offset": -1}, {"limit": "x"}, {"project_id": "p"}, {"access_scope": "all"}):
        ask(client, "GET", "training_runs", status=422, params=query)


def test_external_weights_are_downloaded_by_signed_addresses(client, other):
    model = client.model()
    path = save(client, model, 1, "a", kind="external_weights")
    assert path == f"tinker://{model}/external_weights/a"
    answer = ask(client, "GET", f"{route_of(path)}/external_weights_urls")
    url = answer["urls"]["state.json"]
    assert json.loads(httpx.get(url, trust_env=False).content)["client"] == model
    for changed in (
        url.replace("state.json", "other.json"),
        url.replace("/external_weights/a/", "/weights/a/"),
        url.replace("/downloads/ann/", "/downloads/bob/"),
        url.replace("/downloads/ann/", "/downloads/ann/9"),
    ):
        assert httpx.get(changed, trust_env=False).status_code == 403
    ask(other, "GET", f"{route_of(path)}/external_weights_urls", status=404)
    other_kind = save(client, model, 2, "b")
    ask(client, "GET", f"{route_of(other_kind)}/external_weights_urls", status=400)
    encrypted = {"model_id": model, "seq_id": 3, "path": "c", "age_encryption_recipients": ["age1"]}
    assert "age_encryption_recipients" in client.post("save_weights_external", encrypted, status=422)["detail"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "copy_weights"),
        ("POST", "create_custom_loss"),
        ("POST", "retrieve_futures"),
        ("POST", "sessions/search"),
        ("PUT", "sessions/s/project"),
        ("GET", "sessions/s/trace_export"),
        ("POST", "auth/token"),
        ("GET", "audit"),
        ("GET", "billing/usage/events"),
        ("PATCH", "checkpoints"),
    ],
)
def test_what_is_not_served_is_refused_by_name(client, method, path):
    detail = ask(client, method, path, status=404, json={} if method != "GET" else None)["detail"]
    assert path in detail and method in detail


def test_a_file_of_an_earlier_release_gets_the_columns_that_it_lacks(tmp_path):
    file = tmp_path / "endpoint.sqlite"
    with closing(sqlite3.connect(file)) as old:
        old.execute(
            "CREATE TABLE checkpoints (uri TEXT PRIMARY KEY, owner TEXT NOT NULL, model TEXT NOT NULL, "
            "base TEXT NOT NULL, folder TEXT NOT NULL, spec TEXT NOT NULL, step INTEGER NOT NULL, "
            "created_s REAL NOT NULL, expires_s REAL, is_snapshot INTEGER NOT NULL DEFAULT 0)"
        )
        old.execute("INSERT INTO checkpoints VALUES ('u', 'ann', 'm', 'tiny', 'f', '{}', 1, 1.0, NULL, 0)")
        old.commit()
    for _ in range(2):
        with closing(EndpointStore(file)) as store:
            checkpoint = store.checkpoint("u", owner="ann")
    assert not checkpoint.is_public and checkpoint.num_bytes is None and checkpoint.metadata == {}
