"""Hugging Face's Trainer under torchrun, as in examples/hf_trainer: a real trainer behind the protocol."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringmaster.techniques import DataSpec, ModelSpec
from ringmaster.techniques.processes.events import JobReady
from ringmaster.techniques.processes.reporter import STOP
from tests.integration.workbench import ADAMW, Layout, is_bit_equal, largest_difference

pytest.importorskip("accelerate", reason="which Hugging Face's Trainer needs")
pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

EXAMPLE = Path(__file__).parents[3] / "examples" / "hf_trainer"
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
WORDS = (TORCHRUN, "--standalone", "--nproc-per-node", "{num_devices}", str(EXAMPLE / "train.py"))
ALONE, TOGETHER = Layout("command", 1), Layout("command", 2)


# The same trainer, which waits before its third step until it is asked to stop or a file exists: six steps would end
# too soon.
HELD = """
import runpy, signal, time
from pathlib import Path
from transformers import TrainerCallback, trainer

def is_free():
    return signal.getsignal(signal.SIGTERM).__self__.is_told_to_stop or Path({gate!r}).exists()

class Held(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        while state.global_step == 2 and not is_free():
            time.sleep(0.01)

trainer.DEFAULT_CALLBACKS.append(Held)
runpy.run_path({train!r}, run_name="__main__")
"""


def job(bench, *, words=WORDS, **changes):
    model = ModelSpec(command=words, kwargs={"hidden_size": 16, "num_layers": 2})
    return bench.job(model, data=DataSpec(source="command"), optimizer=ADAMW, num_steps=6, **changes)


@pytest.fixture(scope="module")
def undisturbed(bench, tmp_path_factory):
    return bench.train(job(bench), ALONE, tmp_path_factory.mktemp("undisturbed"))


def test_it_goes_on_bit_equal_where_it_stopped(bench, tmp_path, undisturbed):
    first = bench.train(job(bench), ALONE, tmp_path, last_step=4)
    second = bench.train(job(bench), ALONE, tmp_path)
    assert (first.outcome.result["step"], second.outcome.result["first_step"]) == (4, 4)
    assert first.losses + second.losses == undisturbed.losses
    assert is_bit_equal(second.weights, undisturbed.weights)


def test_two_processes_stop_together_and_one_goes_on(bench, tmp_path, undisturbed):
    """torchrun forwards SIGTERM to both processes, which checkpoint at the same step."""
    script, gate = tmp_path / "held.py", tmp_path / "gate"
    script.write_text(HELD.format(gate=str(gate), train=str(EXAMPLE / "train.py")))
    held = job(bench, words=(*WORDS[:-1], str(script)))
    stopped = bench.train(
        held,
        TOGETHER,
        tmp_path,
        on_event=lambda gang, event: gang.send(STOP) if isinstance(event, JobReady) else None,
    )
    assert stopped.outcome.status == "preempted", stopped.outcome
    step = stopped.outcome.result["step"]
    assert 0 < step < 6
    gate.touch()
    resumed = bench.train(held, ALONE, tmp_path)
    assert resumed.outcome.result["first_step"] == step
    assert stopped.losses + resumed.losses == pytest.approx(undisturbed.losses, abs=1e-4)
    assert largest_difference(resumed.weights, undisturbed.weights) <= 1e-4


BATCH = """
name: mixed
devices: {{cpu: 2}}
jobs:
  - name: theirs
    model: {{command: "torchrun --standalone --nproc-per-node {{num_devices}} {script}",
             kwargs: {{hidden_size: 16, num_layers: 2}}}}
    data: {{source: command}}
    global_batch_size: 8
    num_steps: 10
    num_devices: [1]
  - name: ours
    model: {{architecture: ViTForImageClassification, config: {{patch_size: 2, hidden_size: 16, num_hidden_layers: 1,
             num_attention_heads: 2, intermediate_size: 32}}}}
    data: {{source: digits}}
    global_batch_size: 8
    num_steps: 10
    techniques: [single]
    num_devices: [1]
"""


def test_a_batch_of_theirs_and_ours_runs_whole(tmp_path):
    """The external job is profiled, planned, trained, evaluated by its own metrics and registered."""
    batch = tmp_path / "mixed.yaml"
    batch.write_text(BATCH.format(script=EXAMPLE / "train.py"))
    environment = {**os.environ, "RINGMASTER_HOME": str(tmp_path / "home")}
    for name in ("PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "ringmaster.flows.entry", "run", str(batch), "--json"]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    theirs, ours = result["jobs"]
    assert (theirs["status"], ours["status"]) == ("done", "done")
    assert theirs["segments"][0]["technique"] == "command"
    assert 0 < theirs["metrics"]["loss"] < 6
    assert theirs["model_uri"] == "models:/mixed.theirs/1"
    assert (Path(theirs["model_dir"]) / "model.safetensors").is_file()
    assert result["plan"]["gap"] is not None
