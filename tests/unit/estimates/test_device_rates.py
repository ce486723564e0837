"""Rates of devices: measured once for each machine, kind of devices and type of matrices; a GPU takes the same path."""

import json

import pytest
import torch
from transformers import LlamaForCausalLM  # noqa: F401 - loaded once, and not in each child

from ringmaster.techniques.estimates import device_rates
from ringmaster.techniques.estimates.device_rates import Rates, Sizes, rates
from ringmaster.techniques.processes.order import Slot

GPUS = tuple(Slot(kind="gpu", index=i, uuid=f"GPU-{i}") for i in range(2))


@pytest.fixture
def on_the_cpu(monkeypatch):
    """GPUs of these tests are the CPU, with small things to time; returns the devices that were taken."""
    small = Sizes(matrix=16, vector=64, link_bytes=1 << 17, gradient_bytes=1 << 17)
    monkeypatch.setattr(device_rates, "SIZES", {"cpu": small})
    monkeypatch.setattr(device_rates, "take_device", lambda *_, **__: torch.device("cpu"))
    # Forks of this process, which know what is replaced here.
    forked = device_rates.in_children
    monkeypatch.setattr(device_rates, "in_children", lambda works, **_: forked(works))


def test_gpus_are_measured_as_slots_are_but_one_process_drives_one_of_them(on_the_cpu, tmp_path):
    found = rates(GPUS, precision="fp32", cache_dir=tmp_path)
    assert min(vars(found).values()) > 0
    assert found.parallel == 1.0
    assert found.times_of(2) == 1.0
    alone = rates(GPUS[:1], precision="fp32", cache_dir=tmp_path)
    assert alone.flops_per_s > 0


def test_rates_are_kept_by_devices_and_type_of_matrices(on_the_cpu, tmp_path):
    def kept(precision):
        return rates(GPUS[:1], precision=precision, cache_dir=tmp_path)

    first = kept("fp32")
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "flops_per_s": 7.0}))
    assert kept("fp32").flops_per_s == 7.0 != first.flops_per_s
    assert kept("bf16") == kept("bf16-params") != kept("fp32")
    assert len(list(tmp_path.iterdir())) == 2


def test_rates_that_cannot_be_read_are_measured_again(monkeypatch, tmp_path):
    found = Rates(**dict.fromkeys(Rates.__dataclass_fields__, 2.0))
    monkeypatch.setattr(device_rates, "_measured", lambda *_: found)
    for content in ("", '{"flops_per_s": 1.0', "{}"):
        assert rates(GPUS[:1], precision="fp32", cache_dir=tmp_path) == found
        (file,) = tmp_path.iterdir()
        file.write_text(content)
    assert rates(GPUS[:1], precision="fp32", cache_dir=tmp_path) == found


def test_what_cannot_be_measured_is_not_tried_again_for_each_job(monkeypatch, tmp_path):
    """A link that is blocked takes its whole time limit."""
    tried = []

    def fail(works, *, use_gpus):
        assert use_gpus
        tried.append(works)
        raise RuntimeError("the link is blocked")

    monkeypatch.setattr(device_rates, "in_children", fail)
    for _ in range(3):
        assert rates(GPUS[:1], precision="fp32", cache_dir=tmp_path) is None
    assert len(tried) == 1
    assert rates(GPUS[:1], precision="bf16", cache_dir=tmp_path) is None
    assert len(tried) == 2


def test_a_gpu_is_waited_for_before_a_time_is_taken(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    assert device_rates._best_s(lambda: None, torch.device("cuda", 0)) >= 0
    assert len(waits) == device_rates.REPEATS + 1


def test_threads_of_several_slots_are_faster_by_what_was_measured():
    plain = dict.fromkeys(
        ("flops_per_s", "bytes_per_s", "operators_per_s", "link_bytes_per_s", "message_s", "wrapped_message_s"), 1.0
    )
    found = Rates(**plain, watched_operators_per_s=1.0, recomputed_operators_per_s=1.0, parallel=1.8)
    assert [found.times_of(number) for number in (1, 2, 3)] == pytest.approx([1.0, 1.8, 2.6])
