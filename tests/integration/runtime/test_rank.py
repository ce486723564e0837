"""A rank can be started by hand, as a process of its own, and prints its events."""

import json
import os
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from ringmaster.codec import to_json
from ringmaster.errors import ChannelClosed
from ringmaster.techniques.processes.channel import Channel
from ringmaster.techniques.processes.gang import Gang
from tests.integration.workbench import SINGLE, Layout, is_bit_equal, weights_in

DDP = Layout("ddp", 2)
ENDLESS = 1_000_000
RANK = "ringmaster.techniques.processes.rank"


def test_where_a_rank_cannot_be_started_those_before_it_end(bench, tmp_path):
    started = []

    class OnlyOne:
        def start_rank(self, order, *, rank, log):
            if started:
                raise OSError("no process can be started")
            ours, theirs = socket.socketpair()
            started.append(Channel(theirs))
            return Channel(ours)

    with pytest.raises(OSError, match="no process can be started"):
        Gang(OnlyOne(), bench.order(bench.job(), DDP, tmp_path), num_ranks=2)
    with closing(started[0]) as channel, pytest.raises(ChannelClosed):
        channel.receive()


def run_alone(order, folder, *, rank=0, **options):
    """Starts the entry point without a supervisor."""
    file = folder / "order.json"
    file.write_text(json.dumps({**to_json(order), "rank": rank}))
    command = [sys.executable, "-m", RANK, str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_a_rank_alone_prints_its_events(bench, tmp_path):
    job = bench.job(num_steps=3, loss="tests.integration.stubs:loss_that_prints")
    with run_alone(bench.order(job, SINGLE, tmp_path), tmp_path) as process:
        output, errors = process.communicate()
    events = [json.loads(line) for line in output.splitlines()]
    assert process.returncode == 0, errors
    assert events[0] == {"event": "started", "pid": process.pid}
    assert (events[-1]["event"], events[-1]["result"]["status"]) == ("result", "done")
    assert "a loss is computed" in errors
    assert is_bit_equal(weights_in(tmp_path / "model"), bench.train(job, SINGLE, tmp_path / "forked").weights)


@pytest.mark.full
def test_a_rank_alone_stops_at_a_checkpoint_on_sigterm(bench, tmp_path):
    with run_alone(bench.order(bench.job(num_steps=ENDLESS), SINGLE, tmp_path), tmp_path) as process:
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "steps":
                process.terminate()
    assert (process.returncode, event["event"], event["result"]["status"]) == (0, "result", "preempted")


@pytest.mark.full
def test_a_rank_alone_that_fails_says_why(bench, tmp_path):
    job = bench.job(loss="tests.integration.stubs:loss_that_fails")
    with run_alone(bench.order(job, SINGLE, tmp_path), tmp_path) as process:
        output, _ = process.communicate()
    failed = json.loads(output.splitlines()[-1])
    assert (process.returncode, failed["event"], failed["kind"]) == (1, "failed", "crashed")
    assert failed["message"] == "RuntimeError: no such luck"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "JSONDecodeError"),
        ("[]", "AttributeError"),
        ('{"rank": 0}', "ValueError"),
    ],
)
def test_what_is_no_order_is_refused(tmp_path, text, fault):
    file = tmp_path / "order.json"
    file.write_text(text)
    done = subprocess.run([sys.executable, "-m", RANK, str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{file} holds no order: {fault}" in done.stderr


def test_a_rank_imports_none_of_the_stages_and_their_libraries(bench, tmp_path):
    job = bench.job(num_steps=1)
    environment = {**os.environ, "PYTHONVERBOSE": "1"}
    with run_alone(bench.order(job, SINGLE, tmp_path), tmp_path, env=environment) as process:
        _, imported = process.communicate()
    assert process.returncode == 0
    names = {line.split("'")[1] for line in imported.splitlines() if line.startswith("import '")}
    assert "ringmaster.techniques.training.trainer" in names
    foreign = ("prefect", "mlflow", "pulp", "ringmaster.flows", "ringmaster.tasks", "ringmaster.model_lineage")
    assert not [name for name in names if name.startswith(foreign)]
