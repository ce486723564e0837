"""Training on a GPU, by NCCL too; with `--gpus 1`, the other tests of this folder train on it as well."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ringmaster.features.kernels.job import Numerics
from ringmaster.techniques import Adapter
from ringmaster.techniques.processes.order import TRIAL, rank_argument
from ringmaster.techniques.technique import KERNELS
from tests.integration.techniques.test_conformance import LARGEST_DIFFERENCE
from tests.integration.workbench import (
    ADAMW,
    GPT2,
    GPT2_WITH_DROPOUT,
    LLAMA,
    RESNET,
    SGD,
    SINGLE,
    VIT,
    Layout,
    Workbench,
    is_bit_equal,
    largest_difference,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

ONE = [
    Layout("ddp", 1, {"micro_batch": 4}),
    Layout("zero1", 1),
    Layout("zero2", 1, {"bucket_bytes": 1 << 14, "micro_batch": 4}),
    Layout("zero2", 1, {"bucket_bytes": 1 << 14, "micro_batch": 2, "every_micro_batch": True, "recompute": "full"}),
    Layout("fsdp", 1, {"reshard": True}),
    Layout("fsdp", 1, {"reshard": True, "micro_batch": 2, "recompute": "full"}),
    Layout("fsdp", 1, {"reshard": True, "offload": True}),
    Layout("fsdp_static", 1, {"reshard": True}),
    Layout("tensor", 1, {"sequence_parallel": True, "loss_parallel": False}),
]


@pytest.fixture(scope="session")
def gpu_bench(tmp_path_factory, bench):
    return Workbench(bench.server, tmp_path_factory.mktemp("gpu"), num_gpus=1)


@contextmanager
def group_of_one(bench):
    """Within, each gang has one rank, with a process group."""
    server = bench.server

    def start_rank(order, *, rank, log):
        argument = rank_argument(order, rank=rank)
        return server.spawn(target="tests.integration.shared_gpu:main_of_one", argument=argument, log=log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "start_rank", start_rank, raising=False)
        yield


def log_of(trained):
    return "".join(file.read_text() for file in Path(trained.order.folder).glob("rank-*.log"))[-3000:]


def train(bench, job, layout, folder, **changes):
    trained = bench.train(job, layout, folder, **changes)
    assert trained.outcome.status == "done", f"{trained.outcome}\n{log_of(trained)}"
    return trained


@pytest.mark.parametrize("model", [LLAMA, GPT2, VIT, RESNET], ids=lambda model: model.architecture)
def test_a_gpu_trains_what_a_core_trains(gpu_bench, tmp_path, model):
    """Convolutions on a GPU round to 10 bits of mantissa unless they are told not to."""
    job = gpu_bench.job(model)
    on_cores = Workbench(gpu_bench.server, tmp_path)
    trained, expected = train(gpu_bench, job, SINGLE, tmp_path / "gpu"), train(on_cores, job, SINGLE, tmp_path / "cpu")
    assert largest_difference(trained.weights, expected.weights) <= (5e-3 if "Image" in model.architecture else 1e-5)


@pytest.mark.parametrize("layout", ONE, ids=str)
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=lambda optimizer: optimizer.name)
def test_one_rank_trains_by_nccl_what_single_trains(gpu_bench, tmp_path, layout, optimizer):
    job = gpu_bench.job(optimizer=optimizer, clip_grad_norm=0.1)
    expected = gpu_bench.reference(job)
    with group_of_one(gpu_bench):
        trained = train(gpu_bench, job, layout, tmp_path)
    assert largest_difference(trained.weights, expected.weights) <= LARGEST_DIFFERENCE[optimizer.name]


@pytest.mark.parametrize("layout", [*ONE[:3], ONE[4], ONE[7]], ids=str)
def test_an_exact_job_has_the_bits_of_single(gpu_bench, tmp_path, layout):
    job = gpu_bench.job(
        GPT2_WITH_DROPOUT, optimizer=ADAMW, exact=True, exact_chunk=4, global_batch_size=16, clip_grad_norm=0.1
    )
    layout = replace(layout, config={**layout.config, "micro_batch": 4})
    expected = train(gpu_bench, job, Layout("single", 1, {"micro_batch": 4}), tmp_path / "single")
    with group_of_one(gpu_bench):
        trained = train(gpu_bench, job, layout, tmp_path / "other")
    assert is_bit_equal(trained.weights, expected.weights)
    again = train(gpu_bench, job, Layout("single", 1, {"micro_batch": 4}), tmp_path / "again")
    assert is_bit_equal(again.weights, expected.weights)


@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}, {"precision": "bf16-params", "compile": True}], ids=str)
def test_a_resumed_job_is_bit_equal(gpu_bench, tmp_path, changes):
    job = gpu_bench.job(optimizer=ADAMW, exact=not changes, **({} if changes else {"exact_chunk": 8}), **changes)
    whole = train(gpu_bench, job, SINGLE, tmp_path / "whole")
    train(gpu_bench, job, SINGLE, tmp_path / "halves", last_step=3)
    second = train(gpu_bench, job, SINGLE, tmp_path / "halves")
    assert is_bit_equal(second.weights, whole.weights)


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
@pytest.mark.parametrize("precision", ["bf16", "bf16-params"])
def test_attention_of_ones_choice(gpu_bench, tmp_path, attention, precision):
    model = replace(LLAMA, attention=attention, config={**LLAMA.config, "hidden_size": 64})
    train(gpu_bench, gpu_bench.job(model, precision=precision), SINGLE, tmp_path)


@pytest.mark.parametrize(
    "kernels",
    ["compile:default", "compile:max-autotune-no-cudagraphs", "attention:eager", "attention:flex", "optimizer:foreach"],
)
def test_verified_kernels(gpu_bench, tmp_path, kernels):
    model = replace(LLAMA, config={**LLAMA.config, "hidden_size": 64})
    job = gpu_bench.job(model, optimizer=ADAMW, features=(Numerics(tolerance=1e-3),))
    trained = train(gpu_bench, job, Layout("single", 1, {KERNELS: kernels}), tmp_path / "within")
    assert not trained.said("kernels_refused")
    plain = train(gpu_bench, job.without(Numerics), SINGLE, tmp_path / "plain")
    assert trained.losses == pytest.approx(plain.losses, abs=1e-3)


def test_adapters_and_evaluation(gpu_bench, tmp_path):
    job = gpu_bench.job(optimizer=ADAMW, adapter=Adapter(rank=4, dropout=0.1), precision="bf16-params")
    assert train(gpu_bench, job, SINGLE, tmp_path).outcome.result.metrics["loss"] > 0


def test_a_trial_measures_seconds_and_the_allocators_peak(gpu_bench, tmp_path):
    job = gpu_bench.job(optimizer=ADAMW)
    measured = []

    def handle_event(gang, event):
        if event.NAME == "ready":
            gang.send("measure")
        if event.NAME == "measured":
            measured.append(event)
            gang.send("stop")

    trained = gpu_bench.train(job, SINGLE, tmp_path, on_event=handle_event, purpose=TRIAL)
    assert trained.outcome.status == "done", f"{trained.outcome}\n{log_of(trained)}"
    (profile,) = [event.profile for event in measured]
    assert profile["step_s"] > 0 and 0 < profile["peak_bytes"] < 1 << 30
