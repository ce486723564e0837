"""The client `tinker` and loops of its cookbook, unedited, against `ringmaster serve`."""

import json
import signal
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tests.integration.serving.conftest import served

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]  # the first one also waits for the client's installation

HERE = Path(__file__).parent
COOKBOOK_MODEL = "Qwen/Qwen3-8B"
NUM_STEPS = 12


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory, base):
    with served(tmp_path_factory.mktemp("endpoint"), base, idle_s=600.0) as command:
        yield command


def output_of(process):
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    return output


def test_every_call_of_the_client(endpoint, client_python):
    result = json.loads(output_of(endpoint.client(client_python, HERE / "client_program.py")).splitlines()[-1])
    assert result["models"] == ["tiny"]
    assert result["info"] == ["tiny", 4, 259]
    assert result["losses"][1] < result["losses"][0]
    assert result["custom"][0] == pytest.approx(result["custom"][1])
    assert result["weights"][0] == 4
    assert result["samples"][0] == result["samples"][1]
    forward, prompt, computed = result["logprobs"]
    assert prompt == pytest.approx(forward, abs=1e-4)
    assert computed == pytest.approx(forward, abs=1e-4)
    assert set(result["reinforcement"]) == {"importance_sampling", "ppo", "cispo", "dro", "gspo"}
    assert result["several"][0] == [4, 6]
    scores, records = result["scores"], result["records"]
    assert scores["topk"] == [2] * 5 and scores["drawn"] == [[3, 3], [3, 3]]
    shape, columns, logprobs = scores["targets"]
    assert [shape, columns] == [[3, 6], [0, 3]]
    assert logprobs == pytest.approx([scores["plain"][1], scores["plain"][3]], abs=1e-5)
    assert records.pop("rank") == 4 and records.pop("run") == [True, True]
    assert "copy_weights is not served" in records.pop("copy")
    assert all(value is True for value in records.values()), records
    assert "stable_reinforce" in result["refused"]
    with_optimizer, without, loaded = result["continued"]
    assert with_optimizer == loaded != without
    assert "max_rank" in result["rank"]


def test_a_client_that_ended_is_a_model_of_the_lineage(endpoint, client_python, tmp_path):
    output_of(endpoint.client(client_python, HERE / "client_program.py"))
    file = endpoint.home / "endpoints" / "trial" / "endpoint.sqlite"
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as store:
        sql = "SELECT COUNT(*) FROM clients WHERE NOT is_recorded"
        assert any(not store.execute(sql).fetchone()[0] or threading.Event().wait(0.2) for _ in range(1500))
    endpoint.run("export", "trial.ann", tmp_path / "model", "--merge")
    assert (tmp_path / "model" / "model.safetensors").exists()
    shown = endpoint.run("lineage", "show", "trial.ann")
    assert "lora" in shown


def killed(client, endpoint, *, after, kill):
    """The lines of a program during which something is killed."""
    lines = []
    for line in client.stdout:
        lines.append(line)
        if len(lines) == after:
            kill()
    assert client.wait() == 0, lines
    return [line for line in lines if line[0].isdigit()]


def compute_process(endpoint):
    children = psutil.Process(endpoint.process.pid).children(recursive=True)
    return next(each for each in children if "ringmaster.features.endpoint.compute.process" in each.cmdline())


def test_a_killed_process_and_a_killed_server_change_no_bit(client_python, base, tmp_path):
    with served(tmp_path, base) as endpoint:
        program = HERE / "steps_program.py", NUM_STEPS
        plain = output_of(endpoint.client(client_python, *program)).splitlines(keepends=True)

        def kill_server():
            endpoint.process.kill()
            endpoint.end()
            endpoint.start()

        kill = compute_process(endpoint).kill
        assert killed(endpoint.client(client_python, *program), endpoint, after=4, kill=kill) == plain
        assert killed(endpoint.client(client_python, *program), endpoint, after=4, kill=kill_server) == plain
        assert endpoint.end() == 128 + signal.SIGTERM
        assert not (endpoint.home / "endpoints" / "trial" / "server.json").exists()


@pytest.mark.parametrize("loop", ["supervised", "preference", "reinforcement"])
def test_a_loop_of_the_cookbook(loop, client_python, base, tmp_path):
    folder = tmp_path / "loop"
    folder.mkdir()
    with served(tmp_path, base, name=COOKBOOK_MODEL) as endpoint:
        output_of(endpoint.client(client_python, HERE / "cookbook_loops.py", loop, base, folder))
        (row,) = json.loads(endpoint.run("status", "--json"))
    rows = [json.loads(line) for line in (folder / "log" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) >= 2
    assert row["base"] == COOKBOOK_MODEL and row["rank"] == 4 and row["step"] >= 1
    if loop == "preference":
        assert rows[-1]["dpo_loss"] < rows[0]["dpo_loss"]
    if loop == "supervised":
        assert rows[-1]["train_mean_nll"] < rows[0]["train_mean_nll"]
    assert (folder / "log" / "checkpoints.jsonl").stat().st_size
