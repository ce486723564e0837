"""A user's own technique from examples/custom, trained by the same workers as built-in techniques."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ringmaster.tasks.cluster import detect
from ringmaster.techniques import DataSpec, EvaluationSpec, Job, ModelSpec, OptimizerSpec, registry
from ringmaster.techniques.processes.forkserver_client import ForkServer
from ringmaster.techniques.processes.gang import Gang
from ringmaster.techniques.processes.gang_events import OutcomeStatus
from ringmaster.techniques.processes.order import TRAIN, GangOrder, Slot
from tests.integration.workbench import Workbench
from tests.matrix import matrix

CUSTOM = Path(__file__).parents[3] / "examples" / "custom"


@pytest.fixture(scope="module")
def one_message():
    """The dotted path of the example's technique, registered as in examples/custom/run.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(CUSTOM)
        from my_technique import OneMessage

        registry.register(OneMessage)
        yield registry.dotted_path("one-message")
        del registry.TECHNIQUES.registered["one-message"]
        del sys.modules["my_technique"]


def job() -> Job:
    return Job(
        name="spirals",
        model=ModelSpec(factory="my_models:perceptron", kwargs={"width": 16, "depth": 2}),
        data=DataSpec(factory="my_models:spirals", kwargs={"size": 256}),
        loss="my_models:focal",
        # SGD shows a gradient of the wrong scale, which AdamW would hide.
        optimizer=OptimizerSpec(name="sgd", lr=0.1, options={"momentum": 0.9}),
        clip_grad_norm=1.0,
        global_batch_size=32,
        num_steps=8,
        evaluation=EvaluationSpec(max_batches=2),
    )


def trained(server: ForkServer, folder: Path, *, technique: str, num_ranks: int, micro_batch: int):
    """Returns the final weights [by name] of a gang of CPU slots."""
    order = GangOrder(
        purpose=TRAIN,
        job=job(),
        technique=technique,
        config={"micro_batch": micro_batch, "recompute": "none"},
        slots=tuple(Slot(kind="cpu", index=i, memory_bytes=1 << 33) for i in range(num_ranks)),
        folder=str(folder / "gang"),
        cache_dir=str(folder / "cache"),
        checkpoint_dir=str(folder / "checkpoints"),
        model_dir=str(folder / "model"),
        last_step=8,
        import_paths=(str(CUSTOM),),
        ordered_at_s=time.monotonic(),
    )
    gang = Gang(server, order, num_ranks=num_ranks)
    outcome = gang.wait(lambda event: None)
    assert outcome.status == OutcomeStatus.DONE, f"{outcome.message}\n{gang.log(0).read_text()}"
    (file,) = (folder / "model").glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("micro_batch", matrix([16, 4], quick=[4]))
def test_a_technique_of_ones_own_trains_the_model_that_one_process_trains(
    one_message: str, bench: Workbench, tmp_path: Path, micro_batch: int
):
    alone = trained(
        bench.server, tmp_path / "a", technique="ringmaster.techniques.single:Single", num_ranks=1, micro_batch=32
    )
    together = trained(bench.server, tmp_path / "b", technique=one_message, num_ranks=2, micro_batch=micro_batch)
    assert together.keys() == alone.keys()
    for name, weights in alone.items():
        torch.testing.assert_close(
            together[name], weights, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_registry_lists_it_beside_ours(one_message: str):
    assert registry.names()[: len(registry.BUILTIN)] == tuple(registry.BUILTIN)
    assert "one-message" in registry.names()
    assert "all gradients" in registry.load(one_message).summary


@pytest.mark.full
@pytest.mark.skipif(len(detect("auto").devices) < 2, reason="needs two devices")
def test_the_example_trains_with_it_from_the_batch_to_the_metrics(tmp_path: Path):
    environment = {**os.environ, "RINGMASTER_HOME": str(tmp_path)}
    for name in ("PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI"):
        environment.pop(name, None)
    command = [sys.executable, str(CUSTOM / "run.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()[-4:]
    assert first.startswith("spirals-depth2-seed0 done one-message on 2 {'loss': ")
    assert all(" done " in line for line in others)
