"""Predicted seconds outside the steps: by the bytes of the state, the rates of the disk, and the held-out samples."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from ringmaster.codec import from_json, to_json
from ringmaster.techniques import Adapter, DataSpec, Job, ModelSpec
from ringmaster.techniques.estimates import device_rates
from ringmaster.techniques.estimates.device_rates import DiskRates, disk_rates, segment_costs
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.preflight_result import Candidate

FACTS = ModelFacts(
    num_parameters=1_000_000, parameter_bytes=4_000_000, largest_layer_bytes=1, num_layers=1, has_dropout=False
)
JOB = Job(name="a", model=ModelSpec(), data=DataSpec(), global_batch_size=16, num_steps=1)
DISK = DiskRates(fixed_s=0.01, write_bytes_per_s=1e8, read_bytes_per_s=1e9, copy_bytes_per_s=1e9)


def costs(job=JOB, facts=FACTS, num_ranks=1, step_s=1.0, **more):
    seconds = segment_costs(
        job, facts=facts, num_held_out=40, num_ranks=num_ranks, step_s=step_s, forward_share=0.4, disk=DISK, **more
    )
    return SimpleNamespace(**seconds)


def test_checkpoints_hold_weights_and_moments_and_those_of_adapters_only_what_is_trained():
    assert costs().save_s == pytest.approx(0.01 + 12e6 / 1e8)
    thin = costs(replace(JOB, adapter=Adapter()), replace(FACTS, num_trained=10_000))
    assert thin.save_s == pytest.approx(0.01 + 12e4 / 1e8)
    assert thin.export_s < costs().export_s
    assert thin.stall_s < costs().stall_s < costs().save_s


def test_evaluations_grow_with_held_out_batches_and_starts_with_ranks_and_weights():
    assert costs(step_s=2.0).evaluate_s == pytest.approx(2 * costs().evaluate_s)
    fewer = replace(JOB, evaluation=replace(JOB.evaluation, max_batches=1))
    assert costs(fewer).evaluate_s == pytest.approx(costs().evaluate_s / 3)
    large = replace(FACTS, parameter_bytes=4_000_000_000)
    assert costs().startup_s < costs(num_ranks=2).startup_s < costs(facts=large).startup_s
    assert costs().evaluate_s == pytest.approx(3 * 0.4)
    assert costs(generating_s=2.0).evaluate_s == pytest.approx(3 * (0.4 + 2.0))
    assert costs(generating_s=2.0).save_s == costs().save_s


def test_the_disk_is_measured_once(tmp_path):
    found = disk_rates(tmp_path)
    assert min(vars(found).values()) > 0
    disk_rates.cache_clear()
    assert disk_rates(tmp_path) == found


def test_candidates_that_were_stored_before_stay_readable():
    old = Candidate(technique="ddp", config={}, num_devices=2, num_ranks=2, least_bytes=1, step_s=0.5)
    assert "startup_s" not in to_json(old)
    assert from_json(Candidate, to_json(old)).save_s is None


def test_a_wait_for_a_core_between_readings_of_the_clock_is_no_negative_time(monkeypatch):
    """Else the fastest save of a busy machine takes less than no time, and no plan can be made with it."""
    waited_ns, now_s = iter([0, 3 * 10**8, 3 * 10**8, 3 * 10**8, 3 * 10**8, 3 * 10**8]), iter([1.3, 1.301, 1.302])
    monkeypatch.setattr(device_rates, "_waited_ns", lambda: next(waited_ns))
    monkeypatch.setattr(device_rates, "time", SimpleNamespace(perf_counter=lambda: next(now_s)))
    started_s = device_rates.undisturbed_s()
    assert device_rates.undisturbed_s() - started_s == pytest.approx(0.001)
