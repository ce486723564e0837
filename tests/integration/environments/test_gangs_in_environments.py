"""Gangs of jobs with environments of their own: commands and training, in one batch with different locks."""

from contextlib import closing

import pytest

from ringmaster.features.environment.job import RESULT
from ringmaster.tasks.batch import parse_batch
from ringmaster.tasks.profiling.preflight_runs import run_preflight
from ringmaster.techniques.checkpoints.chain import read_chain
from ringmaster.techniques.preflight_result import PreflightOrder
from ringmaster.techniques.processes import forkserver_client
from ringmaster.techniques.processes.forkserver_client import ForkServer
from ringmaster.techniques.processes.gang import Gang
from ringmaster.techniques.processes.gang_events import Steps
from ringmaster.techniques.registry import dotted_paths
from tests.integration.workbench import SINGLE, Layout
from tests.unit.environments.locks import LIBRARIES, write_lock

TOOLS = """
import torch

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        inputs = torch.tensor([float(index % 7), float(index % 5)])
        return {"inputs": inputs, "targets": inputs.sum()}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, inputs, **_):
        return self.layer(inputs).squeeze(-1)

def rows():
    return Rows(), Rows()

def loss(output, batch):
    errors = FACTOR * (output - batch["targets"]).square()
    return errors.sum(), torch.tensor(float(errors.numel()))
"""
TRAINER = """
import importlib.util

import tinytools
from ringmaster import report

has_torch = importlib.util.find_spec("torch") is not None
for step in range(2):
    report.report(step=step + 1, loss=tinytools.FACTOR, torch=has_torch)
    if report.should_save():
        with report.checkpoint() as folder:
            (folder / "state").write_text(str(step))
"""
COMMAND = """
  - name: {name}
    environment: {{lock: {name}/uv.lock}}
    model: {{command: [python, train.py]}}
    data: {{source: command}}
    num_steps: 2
"""
JOB = """
  - name: {name}
    environment: {{lock: {folder}/uv.lock}}
    model: {{factory: "tinytools:Net"}}
    data: {{factory: "tinytools:rows"}}
    loss: "tinytools:loss"
    num_steps: 2
    global_batch_size: 4
    optimizer: {{name: sgd, lr: 0.01}}
"""


@pytest.fixture(scope="module")
def locks(tmp_path_factory):
    """A folder with two locks of different versions of a package that only environments have."""
    folder = tmp_path_factory.mktemp("locks")
    for number in (1, 2):
        tools = {"tinytools.py": f"FACTOR = {number}\n{TOOLS}"}
        write_lock(folder / f"v{number}", {"tinytools": tools, "libraries": LIBRARIES}, version=f"{number}.0")
    return folder


@pytest.fixture
def in_home_of_bench(bench, monkeypatch):
    monkeypatch.setenv("RINGMASTER_HOME", str(bench.cache_dir.parent))


def order_for(jobs, bench):
    return PreflightOrder(
        jobs=jobs,
        shapes=(bench.shape(1),),
        techniques=dotted_paths(),
        cache_dir=str(bench.cache_dir),
        slots=(bench.slot(0),),
    )


def trained_by(server, order):
    """Returns the result of a gang of one rank that a server starts, and its losses."""
    events = []
    outcome = Gang(server, order, num_ranks=1).wait(events.append)
    assert outcome.status == "done", outcome
    return outcome.result, [loss for event in events if isinstance(event, Steps) for loss in event.losses]


@pytest.mark.full  # its commands below are the quick case
def test_jobs_with_two_locks_are_inspected_and_trained_each_in_its_own(bench, tmp_path, locks, in_home_of_bench):
    text = "jobs:" + "".join(JOB.format(name=name, folder=name) for name in ("v1", "v2"))
    batch = parse_batch(text, folder=locks, name="batch.yaml")
    order = PreflightOrder(
        jobs=batch.jobs,
        shapes=(bench.shape(1),),
        techniques=dotted_paths(),
        cache_dir=str(bench.cache_dir),
        slots=(bench.slot(0),),
    )
    with closing(ForkServer()) as server:
        notices = []
        preflights, faults = run_preflight(order, server=server, notice=notices.append)
        assert not faults
        assert preflights.keys() == {"v1", "v2"}
        assert "preparing the environment of v1" in notices
        results = [trained_by(server, bench.order(job, SINGLE, tmp_path / job.name)) for job in batch.jobs]
        assert server._process is None, "nothing needed the Python of these tests"
    (first, (loss, *_)), (second, (double_loss, *_)) = results
    assert double_loss == pytest.approx(2 * loss)
    for number, result in enumerate((first, second), start=1):
        used = result.others[RESULT]
        assert used["packages"]["tinytools"] == f"{number}.0"
        assert {"torch", "transformers"} <= used["packages"].keys()
        (link,) = read_chain(tmp_path / f"v{number}" / "checkpoints").links
        assert link.environment.versions["tinytools"] == f"{number}.0"
        assert link.environment.versions["python"] == used["python"]


def test_commands_with_two_locks_run_each_in_its_own(bench, tmp_path, in_home_of_bench):
    """They find `python`, Ringmaster's reports and the packages of their lock; nothing else of these tests."""
    (tmp_path / "train.py").write_text(TRAINER)
    for number in (1, 2):
        write_lock(tmp_path / f"v{number}", {"tinytools": {"tinytools.py": f"FACTOR = {number}\n"}})
    text = "jobs:" + "".join(COMMAND.format(name=name) for name in ("v1", "v2"))
    batch = parse_batch(text, folder=tmp_path, name="batch.yaml")
    for number, job in enumerate(batch.jobs, start=1):
        result, losses = trained_by(bench.server, bench.order(job, Layout("command"), tmp_path / job.name))
        assert losses == [number, number]
        assert result.metrics["torch"] == 0
        assert result.others[RESULT]["packages"] == {"tinytools": "1.0"}


@pytest.mark.full
def test_one_server_of_a_python_serves_its_jobs_until_it_is_idle(bench, tmp_path, locks, in_home_of_bench, monkeypatch):
    monkeypatch.setattr(forkserver_client, "IDLE_AFTER_S", 0.1)
    text = "jobs:" + "".join(JOB.format(name=name, folder="v1") for name in ("a", "b"))
    one, other = parse_batch(text, folder=locks, name="batch.yaml").jobs
    with closing(ForkServer()) as server:
        own = server.server_for(one, cache_dir=str(bench.cache_dir))
        assert server.server_for(other, cache_dir=str(bench.cache_dir)) is own
        assert server.server_for(bench.job(), cache_dir=str(bench.cache_dir)) is server
        first = own.start()._process
        assert first.wait() == 0, "it ends by itself, and its memory is free"
        trained_by(server, bench.order(one, SINGLE, tmp_path / "one"))
        assert own._process.pid != first.pid
    assert own._process.poll() is not None
