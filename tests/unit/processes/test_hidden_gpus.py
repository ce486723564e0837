"""Processes on cores open no GPU, after which their children could use none."""

import os

import pytest
import torch

from ringmaster.codec import to_json
from ringmaster.techniques.estimates import job_preflight
from ringmaster.techniques.estimates.device_rates import in_children
from ringmaster.techniques.preflight_result import PreflightOrder
from ringmaster.techniques.processes.order import Slot
from ringmaster.techniques.processes.rank_environment import rank_environment
from ringmaster.techniques.processes.ranks import show_gpus


def open_a_context():
    raise AssertionError("CUDA was asked, which opens a context")


@pytest.fixture
def cuda_build(monkeypatch):
    """A build of PyTorch with CUDA, in the environment of a rank that has not taken its device."""
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", open_a_context, raising=False)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", rank_environment()["PYTORCH_NVML_BASED_CUDA_CHECK"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    show_gpus(())


def test_a_rank_without_a_gpu_asks_cuda_nothing(cuda_build):
    """Each step of an optimizer calls this function, also for tensors on the CPU."""
    assert not torch.cuda.is_available()
    assert not torch.accelerator.is_available()


def test_outside_of_that_environment_cuda_is_asked(cuda_build, monkeypatch):
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK")
    with pytest.raises(AssertionError, match="opens a context"):
        torch.cuda.is_available()


def test_a_rank_sees_the_gpus_of_its_slots_alone(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    show_gpus((Slot(kind="gpu", index=1, uuid="GPU-1"), Slot(kind="gpu", index=3)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1,3"
    show_gpus((Slot(kind="cpu", index=0),))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_an_inspection_and_its_children_see_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (seen,) = in_children([lambda: {"gpus": os.environ["CUDA_VISIBLE_DEVICES"]}])
    assert seen == {"gpus": ""}
    order = PreflightOrder(jobs=(), shapes=(), techniques={}, cache_dir=str(tmp_path))
    job_preflight.main(None, to_json(order))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
