"""Predicted step times: computation, launches and communication of a config determine the order of trials."""

from dataclasses import replace

import pytest

from ringmaster.features.local_updates.job import LocalUpdates
from ringmaster.features.target.execute import choose_variant, exchange_share
from ringmaster.features.target.job import Target, Variables
from ringmaster.techniques import DataSpec, Job, ModelSpec, Profile, registry
from ringmaster.techniques.estimates.device_rates import Rates
from ringmaster.techniques.estimates.layer_times import LayerTimes
from ringmaster.techniques.estimates.measured_steps import StepTimes
from ringmaster.techniques.estimates.memory import Workload
from ringmaster.techniques.estimates.time_estimate import (
    GRADIENTS_PREMIUM,
    MEMORY_PREMIUM,
    THREADS_PREMIUM,
    Outline,
    predicted_step_s,
    times_by_operations,
)
from ringmaster.techniques.model_facts import Decoder, ModelFacts
from ringmaster.techniques.technique import GangShape

FACTS = ModelFacts(
    num_parameters=1_000_000,
    parameter_bytes=4_000_000,
    largest_layer_bytes=200_000,
    num_layers=4,
    has_dropout=False,
    decoder=Decoder(
        architecture="LlamaForCausalLM",
        hidden_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=512,
        seq_len=64,
        window=None,
        is_tied=False,
        modules=(),
    ),
)
JOB = Job(name="a", model=ModelSpec(), data=DataSpec(), global_batch_size=16, num_steps=1)
WORKLOAD = Workload(job=JOB, data={}, facts=FACTS, techniques={}, cache_dir="")
OUTLINE = Outline(num_flops=3e8, num_bytes=3e7, num_operators=500, kept_bytes=3e6)
RATES = Rates(
    flops_per_s=1e11,
    bytes_per_s=9e10,
    operators_per_s=2e5,
    watched_operators_per_s=5e4,
    recomputed_operators_per_s=8e4,
    link_bytes_per_s=2e9,
    message_s=5e-4,
    wrapped_message_s=1.5e-3,
    gradient_bytes_per_s=4e9,
)
FREE = replace(RATES, operators_per_s=1e15, watched_operators_per_s=1e15, message_s=0.0, wrapped_message_s=0.0)


def step_s(technique, *, rates=RATES, times=None, alone=None, num_devices=2, workload=WORKLOAD, kind="cpu", **config):
    shape = GangShape(kind=kind, num_devices=num_devices, memory_bytes=1 << 33)
    config = {"micro_batch": 16 // num_devices, "recompute": "none", **config}
    laid_out = registry.load(registry.BUILTIN[technique])
    alone = alone or times_by_operations(OUTLINE, facts=FACTS, rates=rates)
    return predicted_step_s(
        laid_out,
        config,
        shape,
        workload=workload,
        alone=alone,
        num_operators=OUTLINE.num_operators,
        rates=rates,
        times=times,
    )


def test_where_the_host_updates_weights_are_copied_for_each_micro_batch():
    rates = replace(FREE, host_bytes_per_s=1e9, copy_bytes_per_s=1e10)
    weights = FACTS.num_parameters * 4
    alone = replace(times_by_operations(OUTLINE, facts=FACTS, rates=rates), update_s=0.0)

    def slower_s(micro_batch):
        own = {"rates": rates, "alone": alone, "num_devices": 1, "kind": "gpu", "micro_batch": micro_batch}
        return step_s("offload", **own) / MEMORY_PREMIUM - step_s("single", **own)

    assert slower_s(16) == pytest.approx(7 * weights / 1e9 + 3 * weights / 1e10)
    assert slower_s(4) == pytest.approx(7 * weights / 1e9 + 12 * weights / 1e10)


def test_small_micro_batches_begin_more_operators():
    assert step_s("ddp", micro_batch=2) - step_s("ddp", micro_batch=4) == pytest.approx(2 * 500 / 2e5)
    assert step_s("ddp", rates=FREE, micro_batch=2) == pytest.approx(step_s("ddp", rates=FREE, micro_batch=8))


def test_a_pipeline_weighs_waiting_against_beginning():
    def sizes(rates):
        options = {"schedule": "1f1b", "rates": rates}
        return sorted((2, 4, 8), key=lambda rows: step_s("pipeline", micro_batch=rows, **options))

    assert sizes(FREE) == [2, 4, 8]
    assert sizes(RATES) != [2, 4, 8]


def test_schedules_wait_less_and_begin_more():
    def order(rates):
        schedules = ("1f1b", "interleaved", "zero_bubble")
        return sorted(schedules, key=lambda name: step_s("pipeline", micro_batch=8, schedule=name, rates=rates))

    assert order(FREE) == ["zero_bubble", "interleaved", "1f1b"]
    assert order(replace(FREE, operators_per_s=1e3))[-1] == "zero_bubble"


def test_recomputation_that_chooses_is_dear_where_operators_are():
    assert step_s("ddp", rates=FREE, recompute="selective") < step_s("ddp", rates=FREE, recompute="full")
    slow = replace(FREE, operators_per_s=2e4, watched_operators_per_s=5e3)
    assert step_s("ddp", rates=slow, recompute="selective") > step_s("ddp", rates=slow, recompute="full")


@pytest.mark.parametrize("knob", ["none", "full"])
def test_cut_layers_wait_for_messages_and_more_of_them_with_divided_sequences(knob):
    plain, divided = (step_s("tensor", recompute=knob, sequence_parallel=s, loss_parallel=True) for s in (False, True))
    assert step_s("ddp", recompute=knob) < plain < divided


def test_shards_are_gathered_for_every_micro_batch():
    kept, again = (step_s("fsdp", micro_batch=2, reshard=reshard) for reshard in (False, True))
    assert kept < again
    # Four micro-batches and four layers, with two gathers each instead of one.
    assert again - kept == pytest.approx(1.1 * (16 * 1.5e-3 + 4 * 2e6 / 2e9))


def test_heads_are_more_messages_than_keys_and_sharded_weights_more_than_whole_ones():
    def context(exchange, sharded):
        return step_s("context", micro_batch=16, exchange=exchange, sharded=sharded)

    assert context("all_gather", False) < context("ulysses", False) < context("ulysses", True)
    assert context("all_gather", False) < context("all_gather", True)


def test_local_updates_pay_over_slow_links_alone():
    def local_s(rates, **changes):
        local = LocalUpdates(**{"workers": 2, "sync_every": 10, **changes})
        workload = replace(WORKLOAD, job=replace(JOB, num_steps=100, features=(local,)))
        return step_s("local", rates=rates, workload=workload)

    slow = replace(FREE, gradient_bytes_per_s=GRADIENTS_PREMIUM * 2.5e6)  # 20 Mbit/s
    computing_s = step_s("ddp", rates=replace(FREE, gradient_bytes_per_s=1e15))
    assert step_s("ddp", rates=slow) - computing_s == pytest.approx(4e6 / 2.5e6)
    assert local_s(slow) - computing_s == pytest.approx(0.1 * 4e6 / 2.5e6)
    assert local_s(slow, warmup_steps=50) - computing_s == pytest.approx(0.55 * 4e6 / 2.5e6)
    assert step_s("ddp", rates=FREE) < 1.15 * local_s(FREE)
    assert local_s(slow, workers=4) > local_s(slow)


@pytest.mark.parametrize(("bytes_per_s", "sync_every"), [(2.5e6, 32), (1e8, 8), (1e10, 1)])
def test_local_updates_are_chosen_by_the_share_of_exchanges(bytes_per_s, sync_every):
    rates = replace(FREE, gradient_bytes_per_s=GRADIENTS_PREMIUM * bytes_per_s)
    variables, target = Variables(sync_every=(1, 8, 32), workers=2), Target(metric="loss", at_most=1.0)
    job = replace(JOB, num_steps=1000, features=(variables, target))
    seconds = {(16, "fp32", 1): step_s("ddp", rates=rates)}
    for variant, other in [*job.variants.items()][1:]:
        seconds[variant] = step_s("local", rates=rates, workload=replace(WORKLOAD, job=other))
    profiles = {
        variant: (Profile(technique="any", num_devices=2, num_ranks=2, step_s=each, peak_bytes=1),)
        for variant, each in seconds.items()
    }
    share = exchange_share(profiles, own=job.phase(0).variant)
    choice = choose_variant(job, (), first_step=100, step_s=seconds, exchange_share=share)
    chosen = choice.phases(job)[-1].variant if choice.phases(job) else job.phase(0).variant
    assert chosen == (16, "fp32", sync_every), choice.why


def test_the_slowest_stage_is_waited_for():
    times = LayerTimes(layers_s=(1, 1, 1, 1), forward_s=(0, 0, 0, 0), entry_s=0, exit_s=2)
    options = {"micro_batch": 2, "schedule": "1f1b", "rates": FREE, "times": times}
    even, balanced = (step_s("pipeline", stage_layers=cut, **options) for cut in ([2, 2], [3, 1]))
    assert even > 1.2 * balanced
    assert balanced == pytest.approx(step_s("pipeline", micro_batch=2, schedule="1f1b", rates=FREE))


def test_what_was_measured_on_one_device_is_divided_and_recomputed_as_measured():
    alone = StepTimes(launch_s=0.01, row_s=0.02, update_s=0.1, forward_share=0.4, layers_share=0.3)
    options = {"rates": replace(FREE, parallel=1.8), "alone": alone}
    whole = step_s("single", num_devices=1, micro_batch=16, **options)
    assert whole == pytest.approx(0.01 + 16 * 0.02 + 0.1)
    assert step_s("single", num_devices=1, micro_batch=4, **options) == pytest.approx(whole + 3 * 0.01)
    again = step_s("single", num_devices=1, micro_batch=16, recompute="full", **options)
    assert again == pytest.approx(whole + 0.3 * (0.01 + 16 * 0.02))
    threads = step_s("single", num_devices=2, micro_batch=16, **options)
    faster = 1.8 / THREADS_PREMIUM
    assert threads == pytest.approx(0.01 + 16 * 0.02 / faster + 0.1 / faster)


def test_a_gpu_waits_for_the_host_that_launches_small_micro_batches():
    alone = StepTimes(launch_s=0.0, row_s=0.004, update_s=0.0, forward_share=0.4, layers_share=0.3, host_s=0.04)
    options = {"alone": alone, "num_devices": 1, "kind": "gpu"}
    assert step_s("single", micro_batch=16, **options) == pytest.approx(16 * 0.004)
    assert step_s("single", micro_batch=4, **options) == pytest.approx(4 * 0.04)
    # Recomputation launches operators at 8e4 per second instead of 2e5.
    assert step_s("single", micro_batch=4, recompute="full", **options) == pytest.approx(4 * 0.04 * 2.5)
    assert step_s("single", micro_batch=16, recompute="full", **options) == pytest.approx(0.04 * 2.5)
    assert step_s("single", micro_batch=4, recompute="selective", **options) == pytest.approx(
        4 * (0.04 + OUTLINE.num_operators * (1 / 5e4 - 1 / 2e5))
    )


def test_rows_are_loaded_while_a_gpu_computes():
    alone = StepTimes(launch_s=0.0, row_s=0.004, update_s=0.0, forward_share=0.4, layers_share=0.3, load_s=0.003)
    options = {"num_devices": 1, "kind": "gpu", "micro_batch": 16}
    assert step_s("single", alone=alone, **options) == pytest.approx(16 * 0.004)
    assert step_s("single", alone=replace(alone, load_s=0.005), **options) == pytest.approx(16 * 0.005)


def test_a_teacher_of_the_same_size_adds_a_forward_to_each_row():
    alone = StepTimes(launch_s=0.01, row_s=0.02, update_s=0.1, forward_share=0.4, layers_share=0.3)
    assert alone.with_extra_forward(1.0).row_s == pytest.approx(1.4 * alone.row_s)
    assert alone.with_extra_forward(0.0) == alone


def test_sums_of_gradients_and_threads_take_longer_on_cores_than_by_themselves():
    alone = StepTimes(launch_s=0.0, row_s=0.02, update_s=0.0, forward_share=0.4, layers_share=0.3)
    options = {"rates": replace(FREE, parallel=2.0, gradient_bytes_per_s=4e8), "alone": alone}
    assert step_s("single", **options) == pytest.approx(16 * 0.01 * THREADS_PREMIUM)
    assert step_s("ddp", **options) == pytest.approx(16 * 0.01 + GRADIENTS_PREMIUM * 4e6 / 4e8)
    assert step_s("ddp", kind="gpu", **options) == pytest.approx(16 * 0.01 + 4e6 / 4e8)
