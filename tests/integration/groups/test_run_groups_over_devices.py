"""`ringmaster run` with adapters of a base that no single device may train: one gang of two devices trains them."""

import signal
from pathlib import Path

import pytest

from tests.integration.flows.test_run import FAST_CHECKPOINTS, Place
from tests.integration.groups.test_run_groups import BATCH as ON_ONE
from tests.integration.groups.test_run_groups import save_base
from tests.integration.workbench import largest_difference, weights_in

NAMES = [f"tuned-lr{rate}" for rate in ("1e-4", "2e-4", "4e-4")]  # larger rates would magnify rounding differences
NUM_STEPS = 300
TOLERANCE = 1e-4  # between an undivided and a divided batch, under AdamW
BATCH = ON_ONE.replace("global_batch_size: 1", "global_batch_size: 2").replace(
    "[1.0e-3, 2.0e-3, 4.0e-3, 1.0e-2, 2.0e-2, 4.0e-2]", "[1.0e-4, 2.0e-4, 4.0e-4]"
)
pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = Place(tmp_path_factory.mktemp("over-devices"))
    save_base(place.folder / "base")
    batch = BATCH.format(num_steps=NUM_STEPS, techniques="[fsdp, shared_base]")
    place.batch.write_text(batch.replace("techniques:", "num_devices: [2]\n      techniques:"))
    return place


@pytest.fixture(scope="module")
def alone(place):
    """The weights of each job, trained alone on one device."""
    batch = place.folder / "alone.yaml"
    batch.write_text(BATCH.format(num_steps=NUM_STEPS, techniques="[single]"))
    with place.run(batch=batch) as run:
        result = run.result(exit_code=0)
    return {job["name"]: weights_in(Path(job["model_dir"])) for job in result["jobs"]}


def test_a_group_over_two_devices_is_interrupted_and_resumed_to_nearly_the_same_weights(place, alone):
    with place.run(*FAST_CHECKPOINTS) as run:
        run.read_until("more start at step 0")
        lead = next(name for name in NAMES if f"{name} and " in run.said.decode())
        run.until_checkpointed(place.newest, job=lead)
        run.process.send_signal(signal.SIGINT)
        assert run.result(exit_code=130)["status"] == "interrupted"
    with place.run("--resume") as run:
        result = run.result(exit_code=0)
    groups = result["fusion"]["groups"]
    members = {lead, *groups[lead]}
    assert result["fusion"]["together_s"] < result["fusion"]["alone_s"]
    for job in result["jobs"]:
        if job["name"] in members:
            assert {(s["technique"], s["num_devices"]) for s in job["segments"]} == {("shared_base", 2)}
            assert {s["config"]["base"] for s in job["segments"]} == {"sharded"}
            assert job["segments"][-1]["first_step"] > 0
        assert (job["status"], job["num_steps"]) == ("done", NUM_STEPS)
        assert largest_difference(weights_in(Path(job["model_dir"])), alone[job["name"]]) < TOLERANCE, job["name"]
        assert job["model_uri"].startswith("models:/")
