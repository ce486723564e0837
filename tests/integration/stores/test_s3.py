"""Checkpoints and data in an object store: s3fs with a server that speaks S3."""

import filecmp
import json
import os
import signal
from dataclasses import replace
from uuid import uuid4

import pyarrow
import pytest
import torch
from pyarrow import parquet

from ringmaster.errors import CheckpointError, InputError, ModelNotFound, ObjectStoreUnavailable
from ringmaster.flows.batch.run_folder import checkpoint_root_of
from ringmaster.techniques import DataSpec
from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore, fetch_model, store_model
from ringmaster.techniques.checkpoints.state import Reader, piece_writer
from ringmaster.techniques.checkpoints.storage import check_root, place_of
from ringmaster.techniques.data import prepare
from ringmaster.techniques.data.file_patterns import matching
from ringmaster.techniques.processes.forkserver_client import KeptForkServer
from tests.integration.workbench import ADAMW, SINGLE, Layout, Workbench, is_bit_equal
from tests.matrix import matrix

FSDP = Layout("fsdp", 2, {"reshard": True})
UPLOAD_BYTES = 50 << 20  # s3fs uploads larger files in parts


def forget_settings():
    """Has the environment read anew where a store is opened."""
    from s3fs import S3FileSystem  # with aiobotocore, which takes two seconds

    S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module", autouse=True)
def session_server():
    pytest.importorskip("s3fs")
    from tests.s3_server import S3Server

    server = S3Server()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server
    server.close()


@pytest.fixture
def server(session_server):
    forget_settings()
    yield session_server
    session_server.before = lambda request: None
    forget_settings()


@pytest.fixture
def bucket(server):
    """A URL of a bucket of this test's own."""
    url = server.make_bucket(f"test-{uuid4().hex[:12]}")
    server.forget()
    return url


@pytest.fixture(scope="module")
def gangs(bench, session_server, tmp_path_factory):
    """A workbench whose ranks have the environment of this process, with that of the store."""
    return Workbench(KeptForkServer(bench.server.socket_path), tmp_path_factory.mktemp("bench"))


def keys_below(server, root):
    bucket, _, prefix = root.removeprefix("s3://").partition("/")
    return [key.removeprefix(f"{prefix}/") for key in server.keys(bucket) if key.startswith(prefix)]


def state(step):
    return {"model/w": torch.full((6, 4), float(step)), "model/b": torch.full((4,), float(step))}


def save(root, step, *, attempt="one"):
    """Saves as one rank does while it trains."""
    store = CheckpointStore(root, attempt=attempt)
    store.write_part(step, piece_writer(state(step)))
    store.publish(step, {})


def newest(root):
    found = CheckpointStore(root).newest()
    if found is None:
        return None
    with Reader(found) as reader:
        assert all(torch.equal(reader.whole(name), value) for name, value in state(found.manifest.step).items())
    return found.manifest.step


@pytest.mark.parametrize("layout", matrix([SINGLE, FSDP], quick=[SINGLE]))
def test_a_job_saves_resumes_and_removes_old_checkpoints(gangs, server, bucket, tmp_path, layout):
    job, root = gangs.job(optimizer=ADAMW, num_steps=6), f"{bucket}/run/tiny"
    first = gangs.train(job, layout, tmp_path / "one", last_step=4, checkpoint_every_s=0.0, checkpoint_dir=root)
    assert first.outcome.result.step == 4 and first.said("checkpoint")
    second = gangs.train(job, layout, tmp_path / "two", checkpoint_dir=root)
    assert second.outcome.result.first_step == 4
    assert is_bit_equal(second.weights, gangs.train(job, layout, tmp_path / "undisturbed").weights)
    kept = {key.partition("/")[0] for key in keys_below(server, root)}
    assert kept - {"latest", "chain.json"} == {"step-00000004", "step-00000006"}
    shards = [key for key in keys_below(server, root) if key.endswith(".safetensors")]
    assert len(shards) == 2 * layout.num_devices and not [key for key in keys_below(server, root) if "part-" in key]


@pytest.mark.full
def test_a_crash_in_the_middle_of_a_save_leaves_the_former_checkpoint(gangs, server, bucket, tmp_path):
    job, root = gangs.job(optimizer=ADAMW, num_steps=40), f"{bucket}/killed"
    published, running = [], []

    def before(request):
        if request.kind == "PUT" and request.path.endswith("manifest.json"):
            if len(published) == 2:  # its shard is there, and its manifest will not be
                os.kill(running[0].pids[0], signal.SIGKILL)
                return 503
            published.append(request.path)
        return None

    server.before = before
    killed = gangs.train(
        job,
        Layout("tests.integration.stubs:HeldSingle", 1, {"most_saves": 12}),
        tmp_path / "killed",
        checkpoint_every_s=0.0,
        checkpoint_dir=root,
        on_event=lambda gang, event: running.append(gang),
    )
    server.before = lambda request: None
    assert killed.outcome.status == "crashed"
    folders = {key.partition("/")[0] for key in keys_below(server, root)} - {"latest", "chain.json"}
    assert len(folders) == 3, "two checkpoints, and a shard without a manifest"
    found = CheckpointStore(root).newest()
    assert published[-1].endswith(f"{found.name}/manifest.json")
    again = gangs.train(job, SINGLE, tmp_path / "again", checkpoint_dir=root)
    assert again.outcome.result.first_step == found.manifest.step
    assert is_bit_equal(again.weights, gangs.reference(job).weights)
    assert len(place_of(root).names()) == 2, "what the crash had left was removed"


SAVE_REQUESTS = {"PUT": 4, "LIST": 4, "GET": 2, "DELETE": 3}
RESUME_REQUESTS = {"LIST": 1, "HEAD": 1, "GET": 3}


def test_requests_of_a_save_and_of_a_resume(server, bucket):
    root = f"{bucket}/counted"
    for step in (1, 2):
        save(root, step)
    server.forget()
    save(root, 3)
    assert server.counts() == SAVE_REQUESTS
    server.forget()
    assert newest(root) == 3
    assert server.counts() == RESUME_REQUESTS


def test_a_large_file_is_uploaded_in_parts(server, bucket):
    place, block = place_of(f"{bucket}/large"), bytes(1 << 20)
    place.write("shard", (block for _ in range((UPLOAD_BYTES >> 20) + 10)))
    assert server.counts() == {"BEGIN UPLOAD": 1, "UPLOAD PART": 2, "END UPLOAD": 1}
    assert sum(map(len, place.blocks("shard"))) == UPLOAD_BYTES + (10 << 20)


def test_only_the_rows_of_a_rank_are_read(server, bucket):
    root, whole = f"{bucket}/ranges", {"model/w": torch.arange(4_000_000.0).reshape(50_000, 80)}
    CheckpointStore(root).save(1, piece_writer(whole), {})
    found = CheckpointStore(root).newest()
    server.forget()
    with Reader(found) as reader:
        target = torch.zeros(10, 80)
        reader._read(found.manifest.tensors["model/w"], ((25_000, 0), (10, 80)), target)
    assert torch.equal(target, whole["model/w"][25_000:25_010])
    assert server.counts() == {"GET": 2} and all(request.range for request in server.requests)


# -- finished models ---------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_model_is_trained_on_by_a_machine_that_has_only_the_store(gangs, bucket, tmp_path):
    first = replace(gangs.job(), name="first")
    stored = gangs.train(
        first, SINGLE, tmp_path / "one", checkpoint_dir=f"{bucket}/first", model_url=f"{bucket}/first/model"
    )
    second = replace(gangs.job(seed=1), name="second", base="first")
    here = tmp_path / "two" / "models" / "first"
    found = gangs.train(
        second, FSDP, tmp_path / "two", weights_from=str(here), model_urls={str(here): f"{bucket}/first/model"}
    )
    usual = gangs.train(second, FSDP, tmp_path / "usual", weights_from=stored.order.model_dir)
    assert is_bit_equal(found.weights, usual.weights)
    assert filecmp.dircmp(here, stored.order.model_dir).diff_files == []


def test_a_model_that_is_damaged_or_missing_in_the_store_is_refused(server, bucket, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(ModelNotFound, match="To fix: share the folder"):
        fetch_model(f"{bucket}/job/model", tmp_path / "copy")
    store_model(tmp_path / "model", f"{bucket}/job/model")
    server.client().put_object(Bucket=bucket.removeprefix("s3://"), Key="job/model/model.safetensors", Body=b"noise")
    with pytest.raises(ModelNotFound, match="damaged"):
        fetch_model(f"{bucket}/job/model", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    (tmp_path / "model" / "old").touch()
    store_model(tmp_path / "model", f"{bucket}/job/model")
    (tmp_path / "model" / "old").unlink()
    store_model(tmp_path / "model", f"{bucket}/job/model")
    fetch_model(f"{bucket}/job/model", tmp_path / "copy")
    assert [file.name for file in (tmp_path / "copy").iterdir()] == ["model.safetensors"]


# -- a store that fails ------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_errors_that_pass_are_retried_by_botocore(server, bucket, monkeypatch):
    root = f"{bucket}/retried"
    server.fail_first(2, kind="PUT")
    save(root, 1)
    server.fail_first(2, kind="GET")
    assert newest(root) == 1
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    forget_settings()
    server.fail_first(1, kind="PUT")
    with pytest.raises(CheckpointError, match="step-00000002 could not be written under s3://"):
        CheckpointStore(root).save(2, piece_writer(state(2)), {})
    assert newest(root) == 1


def test_a_store_that_does_not_answer_is_not_taken_for_a_damaged_checkpoint(server, bucket, monkeypatch):
    root = f"{bucket}/away"
    save(root, 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    forget_settings()
    server.fail_first(1, kind="GET")
    with pytest.raises(ObjectStoreUnavailable):
        newest(root)
    assert newest(root) == 1


FAULTS = {
    "no credentials": r"Unable to locate credentials. To fix: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "no bucket": r"The specified bucket does not exist. To fix: create the bucket of s3://\S*, or correct its name",
    "another endpoint": r"Could not connect to the endpoint URL: \S+. To fix: check that the store runs, and its "
    r"address: AWS_ENDPOINT_URL=http://127.0.0.1:9",
    "refused": r"(Forbidden|does not have|Access Denied|403)[^.]*. To fix: check the credentials",
}


@pytest.fixture(params=FAULTS)
def fault(request, server, bucket, monkeypatch):
    """What is wrong, and the URL of a bucket with it."""
    if request.param == "no credentials":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    elif request.param == "another endpoint":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    elif request.param == "refused":
        server.before = lambda request: 403
    forget_settings()
    return FAULTS[request.param], "s3://no-such-bucket" if request.param == "no bucket" else bucket


def test_a_store_that_cannot_be_used_is_refused_before_anything_starts(fault, server, monkeypatch):
    why, url = fault
    with pytest.raises(ValueError, match=f"checkpoints cannot be stored at {url}/prefix: {why}"):
        check_root(f"{url}/prefix")
    monkeypatch.setenv("RINGMASTER_CHECKPOINTS", f"{url}/prefix")
    with pytest.raises(
        InputError, match=f"RINGMASTER_CHECKPOINTS: checkpoints cannot be stored at {url}/prefix: {why}"
    ):
        checkpoint_root_of({}, resume=False)
    server.before = lambda request: None
    assert "no-such-bucket" not in [found["Name"] for found in server.client().list_buckets()["Buckets"]]


@pytest.mark.parametrize("fault", matrix(FAULTS, quick=["no bucket"]), indirect=True)  # the causes are those above
def test_data_that_cannot_be_read_is_refused_with_the_cause(fault):
    why, url = fault
    for pattern in (f"{url}/rows.jsonl", f"{url}/*.jsonl"):
        with pytest.raises(ValueError, match=f"s3://.*({why}|matches no file: The specified bucket does not exist)"):
            matching(pattern)


def test_the_check_of_a_root_leaves_nothing(server, bucket):
    check_root(f"{bucket}/prefix")
    assert server.counts() == {"PUT": 1, "GET": 1, "LIST": 2, "DELETE": 1}
    assert keys_below(server, bucket) == []


# -- data --------------------------------------------------------------------------------------------------------------


def write_rows(folder):
    """Writes the same rows in each format; returns the files."""
    rows = [{"text": f"row {number} tells of {number * 7 % 50} things. " * 3} for number in range(60)]
    files = {name: folder / f"rows.{name}" for name in ("jsonl", "csv", "parquet", "txt")}
    files["jsonl"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    files["csv"].write_text("text\n" + "".join(f"{row['text']}\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), files["parquet"])
    files["txt"].write_text("".join(f"{row['text']}\n" for row in rows))
    return files


@pytest.mark.parametrize("format", matrix(["jsonl", "csv", "parquet", "txt"], quick=["jsonl", "parquet"]))
def test_data_is_read_once_and_is_that_of_a_local_file(server, bucket, tmp_path, format):
    file = write_rows(tmp_path)[format]
    server.client().upload_file(str(file), bucket.removeprefix("s3://"), f"data/{file.name}")
    server.forget()
    spec = DataSpec(path=f"{bucket}/data/*.{format}", seq_len=16, vocab_size=280)
    remote = prepare(spec, cache_dir=tmp_path / "cache")
    local = prepare(replace(spec, path=str(file)), cache_dir=tmp_path / "cache")
    assert remote.digest == local.digest
    assert server.counts() == {"LIST": 2, "GET": 1}
    server.forget()
    assert prepare(spec, cache_dir=tmp_path / "cache") == remote
    assert server.counts() == {"LIST": 1}
    assert prepare(spec, cache_dir=tmp_path / "another machine").digest == remote.digest


def test_a_file_that_has_changed_is_read_again(server, bucket, tmp_path):
    files, spec = write_rows(tmp_path), DataSpec(path=f"{bucket}/rows.txt", seq_len=16, vocab_size=280)
    client, name = server.client(), bucket.removeprefix("s3://")
    client.upload_file(str(files["txt"]), name, "rows.txt")
    first = prepare(spec, cache_dir=tmp_path / "cache")
    client.put_object(Bucket=name, Key="rows.txt", Body=files["txt"].read_bytes().replace(b"things", b"others"))
    assert prepare(spec, cache_dir=tmp_path / "cache").digest != first.digest
