"""A home that release 0.1.0 made: its batches are listed, one resumes, and plans need no trials."""

import json

import pytest
from typer.testing import CliRunner

from ringmaster.flows import cli
from ringmaster.tasks import cluster
from ringmaster.tasks.profiling import profile_store
from tests.integration.releases.homes import DEVICE_NAME, unpack

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

# What the profiles were measured with.
MEMORY_BYTES = 25_276_514_304
VERSIONS = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the home and of its batch files, on a machine that looks like the one on which they were made."""
    folder = tmp_path_factory.mktemp("0.1")
    unpack("home-0.1", to=folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGMASTER_HOME", str(folder / "home"))
        patch.chdir(folder)
        patch.setattr(cluster, "cpu_slots", slots)
        patch.setattr(profile_store, "_versions", lambda: VERSIONS)
        yield folder


def slots(number=2, **_):
    memory_bytes = MEMORY_BYTES // number
    return tuple(
        cluster.Device(kind="cpu", index=i, name=DEVICE_NAME, memory_bytes=memory_bytes, cores=(0,))
        for i in range(number)
    )


def ringmaster(*arguments):
    """The JSON that a command prints."""
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, f"{done.output}\n{done.stderr}"
    return json.loads(done.stdout)


def test_its_batches_and_its_models_are_listed(folder):
    rows = {row["job"]: (row["batch"], row["status"], row["step"]) for row in ringmaster("status", "--json")}
    assert rows == {"vit": ("done", "done", 20), "longer": ("cut", "waiting", 195)}
    shown = ringmaster("lineage", "show", "done.vit", "--json")["model"]
    assert (shown["label"], shown["kind"], shown["origin"]["num_steps"]) == ("done.vit/1", "pretrained", 20)


def test_it_plans_with_the_profiles_that_it_has(folder):
    found = ringmaster("run", "done.yaml", "--dry-run", "--json")
    assert (found["status"], found["num_trials"], found["predicted"]) == ("planned", 0, [])


def test_an_interrupted_batch_goes_on_from_its_checkpoint(folder):
    result = ringmaster("run", "cut.yaml", "--resume", "--json")
    (job,) = result["jobs"]
    assert (result["status"], result["num_trials"], job["status"]) == ("done", 0, "done")
    rows = {row["job"]: (row["status"], row["step"]) for row in ringmaster("status", "--json")}
    assert rows["longer"] == ("done", 4000)
    shown = ringmaster("lineage", "show", "cut.longer", "--json")["model"]
    assert shown["origin"]["num_steps"] == 4000
