"""Ranks that are started as processes of their own end, report and train as those of the fork server do."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from ringmaster.codec import to_json
from ringmaster.errors import ChannelClosed
from ringmaster.techniques.processes.channel import Channel
from ringmaster.techniques.processes.events import Beat, Steps, event_to_json
from ringmaster.techniques.processes.gang import Gang
from ringmaster.techniques.processes.process_launcher import RANK, ProcessLauncher
from tests.integration.runtime.test_forkserver import wait_for, wait_until_gone
from tests.integration.runtime.test_gangs import assert_gone, signal_once
from tests.integration.workbench import SINGLE, Layout, Workbench, is_bit_equal, weights_in
from tests.matrix import matrix

DDP = Layout("ddp", 2)
LINGERING = Layout("tests.integration.stubs:Lingering")
ENDLESS = 1_000_000
# What identifies an event; the rest are durations and process ids.
KEYS = ("event", "phase", "step", "losses", "metrics")


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """A workbench whose ranks are processes of their own."""
    return Workbench(ProcessLauncher(), tmp_path_factory.mktemp("processes"))


def shown(trained):
    events = [event_to_json(event) for event in trained.events if not isinstance(event, Beat)]
    return [{key: event[key] for key in KEYS if key in event} for event in events]


@pytest.mark.parametrize("layout", matrix([SINGLE, DDP], quick=[DDP]), ids=str)
def test_both_launchers_train_to_the_same_weights_with_the_same_events(bench, processes, tmp_path, layout):
    job = bench.job(num_steps=3)
    forked = bench.train(job, layout, tmp_path / "forked")
    started = processes.train(job, layout, tmp_path / "started", cache_dir=str(bench.cache_dir))
    assert is_bit_equal(started.weights, forked.weights)
    assert started.outcome.result["metrics"] == forked.outcome.result["metrics"]
    assert shown(started) == shown(forked)


@pytest.mark.parametrize("rank", matrix([0, 1], quick=[1]))
def test_a_killed_rank_ends_its_gang_which_names_it(processes, tmp_path, rank):
    on_event, sent = signal_once(signal.SIGKILL, rank=rank, at="steps")
    trained = processes.train(processes.job(num_steps=ENDLESS), DDP, tmp_path, on_event=on_event)
    assert trained.outcome.status == "crashed"
    assert trained.outcome.message.startswith(f"rank {rank} was killed by SIGKILL while training")
    assert trained.outcome.was_killed
    assert_gone(sent[0])


@pytest.mark.full
def test_a_gang_of_processes_stops_at_a_checkpoint_on_command(processes, tmp_path):
    def stop(gang, event):
        if isinstance(event, Steps):
            gang.send("stop")

    job = processes.job(num_steps=ENDLESS)
    stopped = processes.train(job, SINGLE, tmp_path, on_event=stop)
    assert stopped.outcome.status == "preempted"
    assert (tmp_path / "gang" / "rank-0.log").exists()


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


def test_hanging_up_ends_a_rank_and_its_children(processes, tmp_path):
    order = processes.order(processes.job(), LINGERING, tmp_path)
    (tmp_path / "gang").mkdir()
    with closing(ProcessLauncher().start_rank(order, rank=0, log=tmp_path / "log")) as channel:
        pids = wait_for(channel, "lingering")["pids"]
        channel.hang_up()
        assert wait_for(channel, "exit") == {"event": "exit", "status": -signal.SIGKILL, "fenced": False}
        with pytest.raises(ChannelClosed):
            channel.receive()
    for pid in pids:
        wait_until_gone(pid)


OWNER = """
import json, sys
from pathlib import Path
from ringmaster.codec import from_json
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.processes.process_launcher import ProcessLauncher
order = from_json(GangOrder, json.load(sys.stdin))
channel = ProcessLauncher().start_rank(order, rank=0, log=Path(order.folder, "log"))
while (message := channel.receive())["event"] != "lingering":
    pass
print(*message["pids"], flush=True)
channel.receive()
"""


def test_no_rank_survives_a_supervisor_that_was_killed(processes, tmp_path):
    order = processes.order(processes.job(), LINGERING, tmp_path)
    (tmp_path / "gang").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        owner.stdin.write(json.dumps(to_json(order)))
        owner.stdin.close()
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2
        owner.kill()
    for pid in pids:
        wait_until_gone(pid)


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
