"""Nodes that share no folder: their jobs' checkpoints, models and data are in an object store."""

import os
import time
from dataclasses import replace

import pytest

from ringmaster.techniques import DataSpec
from ringmaster.techniques.checkpoints.checkpoint import fetch_model
from tests.cluster.checks import assert_devices_held_once, assert_nothing_twice, assert_well
from tests.cluster.conftest import LOST_S, PATIENCE
from tests.cluster.jobs import CONFIG, profiles_of, torch_job
from tests.cluster.pool import Pool
from tests.cluster.waiting import TIMEOUT_S, until
from tests.integration.workbench import Layout, is_bit_equal, weights_in, write_prose
from tests.s3_server import S3Server

OTHER = {"gamma": "delta", "delta": "gamma"}
BUCKET = "s3://training"


@pytest.fixture(scope="module")
def store(network):
    """An S3 server that all nodes reach, and whose environment the tests' own process has, too."""
    server = S3Server(network.address)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        server.make_bucket(BUCKET.removeprefix("s3://"))
        yield server
    server.close()


@pytest.fixture(scope="module")
def pool(network, pool_postgresql, session_pool, store, tmp_path_factory):
    """A pool of two nodes. Each has a home of its own at the same path, and sees neither the other's nor the
    controller's. The Prefect server and its deployments are those of the session's pool.
    """
    folder = tmp_path_factory.mktemp("apart")
    pool = Pool(
        folder,
        network=network,
        database_url=pool_postgresql.create("apart"),
        prefect=session_pool.prefect,
        mlflow_uri=f"sqlite:///{folder}/mlflow.db",
        timeouts=PATIENCE,
    )
    pool.environment |= store.environment
    try:
        cores = sorted(os.sched_getaffinity(0))
        for number, name in enumerate(OTHER):
            pool.add_node(name, core=cores[number % len(cores)]).give_own(pool.home, folder / f"home-of-{name}")
        pool.heal()
        yield pool
    finally:
        pool.close()


def node_of(pool, job):
    step = pool.trace.of(job=job)[-1]
    return next(name for name, node in pool.nodes.items() if node.mark == step["node"]), step["pid"]


def fetched(pool, batch, job):
    """Returns the folder of a finished model, as the recorder of a batch gets it."""
    folder = pool.model_dir(batch, job)
    assert not folder.exists(), "the nodes share a folder"
    fetch_model(f"{BUCKET}/runs/batches/{batch}/{job}/model", folder)
    return folder


def test_a_job_and_the_one_that_begins_with_its_model_move_to_another_node(pool, bench, tmp_path, recovered):
    """A node is lost with all its processes: its job continues elsewhere, from the same checkpoint and base."""
    first = torch_job("first", trace=pool.trace.file, num_steps=20, step_s=0.1)
    second = torch_job("second", trace=pool.trace.file, base="first")
    pool.trace.hurry("first")
    batch = pool.submit([first, second], checkpoint_root=f"{BUCKET}/runs")
    pool.wait_for_checkpoint(batch, job="second")
    name, pid = node_of(pool, "second")
    before_s = time.monotonic()
    pool.nodes[name].unplug()
    pool.nodes[name].lose()
    until("the node is given up", lambda: name not in pool.serving(), seconds=3 * LOST_S + TIMEOUT_S)
    recovered(f"a node lost: found, where it may be silent for {LOST_S:g} s", time.monotonic() - before_s)
    lost_s = time.monotonic()
    again = pool.trains("second", after_s=before_s, not_by=pid, node=OTHER[name])
    recovered("a node lost: its job trains elsewhere, after that", again["s"] - lost_s)
    pool.finish(batch)
    pool.nodes[name].mend()
    models = {job.name: fetched(pool, batch, job.name) for job in (first, second)}
    assert_well(pool, batch, [first], bench)
    undisturbed = bench.train(
        replace(second, model=replace(second.model, kwargs={**second.model.kwargs, "step_s": 0.0, "trace": ""})),
        Layout("single", 1, CONFIG),
        tmp_path / "second",
        weights_from=str(models["first"]),
    )
    assert is_bit_equal(weights_in(models["second"]), undisturbed.weights)
    saved = next(segment for segment in pool.segments(batch) if segment.job == "second" and segment.spec.first_step)
    assert saved.spec.first_step > 0, "it went on from the checkpoint of the other node"


def test_data_in_the_store_is_prepared_by_each_node(pool, store, bench, tmp_path):
    pool.heal()
    prose = write_prose(tmp_path / "prose.txt")
    store.client().upload_file(str(prose), BUCKET.removeprefix("s3://"), "data/prose.txt")
    data = DataSpec(path=f"{BUCKET}/data/*.txt", seq_len=24, vocab_size=300)
    jobs = [replace(bench.job(data=data), name=name, seed=seed) for seed, name in enumerate(("one", "two"))]
    profiles = {job.name: profiles_of(torch_job(job.name)) for job in jobs}
    batch = pool.submit(jobs, profiles=profiles, checkpoint_root=f"{BUCKET}/runs")
    pool.wait(batch)
    assert_nothing_twice(pool, batch)
    assert_devices_held_once(pool)
    for job in jobs:
        folder = fetched(pool, batch, job.name)
        local = replace(job, data=replace(data, path=str(prose)))
        undisturbed = bench.train(local, Layout("single", 1, CONFIG), tmp_path / job.name)
        assert is_bit_equal(weights_in(folder), undisturbed.weights)
        assert (folder / "tokenizer.json").is_file()
