"""A pool's database that release 0.1.0 made: `up` opens it, and its batch continues from its checkpoint."""

import json
import sqlite3
from contextlib import closing

import pytest

from ringmaster.tasks import cluster
from tests.cluster.waiting import until
from tests.integration.releases.homes import unpack
from tests.pool_home import Home

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

TIMEOUT_S = 600
CHECKPOINT = 2493  # the last step under 0.1.0


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The pool, running under this release, with devices that the fixture calls as this machine's are called."""
    folder = tmp_path_factory.mktemp("0.1")
    unpack("pool-0.1", to=folder, kind=cluster.detect({"cpu": 1}).device_kind())
    home = Home(folder / "pool-home")
    try:
        done = home.up("--json")
        assert done.returncode == 0, done.stderr
        yield home
    finally:
        home.down()


def rows(home, file, query):
    with closing(sqlite3.connect(home.folder / file)) as database:
        return database.execute(query).fetchall()


def test_its_batch_goes_on_from_its_checkpoint_as_planned_from_its_profiles(home):
    def goes_on():
        ((status, step),) = rows(home, "pool/pool.db", "SELECT status, step FROM jobs WHERE name = 'shared'")
        assert status in ("running", "waiting", "done"), status
        return step > CHECKPOINT

    until("the job continues", goes_on, seconds=TIMEOUT_S)
    segments = [json.loads(what) for (what,) in rows(home, "pool/pool.db", "SELECT what FROM segments ORDER BY id")]
    assert [segment["first_step"] for segment in segments[:2]] == [0, CHECKPOINT]
    profiles = "SELECT experiment_id FROM experiments WHERE name = 'ringmaster-profiles'"
    recorded = rows(home, "mlflow.db", f"SELECT count(*) FROM runs WHERE experiment_id = ({profiles})")
    assert recorded == [(8,)], "no trial was made"
    status = home.ringmaster("status", "--json")
    batches = [row["batch"] for row in json.loads(status.stdout)]
    assert batches.count("pooled") == 1, status.stdout + status.stderr  # its scheduled retraining may have begun too
