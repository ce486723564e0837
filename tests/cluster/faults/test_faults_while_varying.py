"""A job on the way to a target, whose learning rate and batch size are chosen while controller and node are killed."""

import json
from dataclasses import replace

import pytest

from ringmaster.features.target.job import Target, Variables
from tests.cluster.checks import assert_devices_held_once, assert_nothing_twice
from tests.cluster.faults.test_faults_of_nodes import node_of
from tests.cluster.faults.test_faults_of_parents import assert_done, batch_of
from tests.cluster.jobs import batch_file, torch_job
from tests.cluster.machines import end
from tests.cluster.stubs import leave_to_hurry
from tests.cluster.waiting import until
from tests.integration.workbench import Layout, is_bit_equal, weights_in

PROBE = 60


@pytest.mark.full
def test_a_job_that_varies_survives_its_controller_and_its_node(pool, parents, bench, tmp_path):
    """What is chosen, and the weights, are those of an undisturbed run of the job from its first step."""
    pool.trace.cloned.add("aimed")  # the short runs write its name, too
    variables = {"global_batch_size": [2, 32], "lr": [1e-4, 1e-2]}
    job = replace(torch_job("aimed", trace=pool.trace.file, num_steps=10 * PROBE, step_s=0.05), global_batch_size=2)
    file = batch_file(tmp_path, "aiming", [job])
    content = json.loads(file.read_text())
    content["jobs"][0] |= {"target": {"metric": "eval/loss", "at_most": 1e-9}, "may_vary": variables}
    content["jobs"][0]["optimizer"]["lr"] = 1e-4
    content["jobs"][0]["evaluation"]["every_steps"] = 50
    file.write_text(json.dumps({**content, "objective": "time-to-target"}))
    pool.trace.hurry("aimed")  # while it is measured, as sleeping takes longer for larger batches
    parent = parents("run", file, "--checkpoint-every", 0.2, "--json")
    batch = batch_of(pool, "aiming", parent)
    leave_to_hurry(pool.trace.file, "aimed").unlink()

    def segments():
        return [segment for segment in pool.segments(batch) if segment.job == "aimed"]

    until("it continues from a short run", segments)
    epoch = pool.epoch()
    end(pool.executor)
    pool.start_executor()
    until("another one leads", lambda: pool.epoch() > epoch)
    until("its batch size has changed", lambda: segments()[-1].spec.first_step >= PROBE)
    pool.wait_for_checkpoint(batch, job="aimed", beyond=PROBE)
    name, _ = node_of(pool, "aimed")
    pool.workers[name].kill()
    pool.workers[name].wait()
    pool.start_worker(name)
    pool.trace.hurry("aimed")
    assert_done(parent)

    records, all_segments = pool.jobs(batch), segments()
    assert {name: (each.status, each.step) for name, each in records.items() if name != "aimed"} == {
        "aimed.lr-0.0001": ("stopped", 30),
        "aimed.lr-0.01": ("stopped", 30),
    }
    aimed = records["aimed"]
    assert (aimed.status, all_segments[0].spec.first_step) == ("done", 30)
    assert "continues from step 30 of aimed.lr-0.01" in aimed.choice
    assert f"batches of 32 samples in fp32 in place of 2 in fp32 from step {PROBE}" in aimed.choice
    assert_nothing_twice(pool, batch)
    assert_devices_held_once(pool)
    may_vary = Variables(global_batch_size=(2, 32))  # as it decides in which parts gradients are measured
    kwargs, target = {**job.model.kwargs, "trace": ""}, Target(metric="loss", at_most=1e-9)
    whole = aimed.of(replace(job, model=replace(job.model, kwargs=kwargs), features=(may_vary, target)))
    for last_step in (PROBE, whole.total_steps):
        (config,) = {
            json.dumps(segment.spec.config) for segment in all_segments
            if (segment.spec.first_step < PROBE) == (last_step == PROBE)
        }  # fmt: skip
        undisturbed = bench.train(whole, Layout("single", 1, json.loads(config)), tmp_path, last_step=last_step)
    assert is_bit_equal(weights_in(pool.model_dir(batch, "aimed")), undisturbed.weights)
