"""Predicted memory of options, compared with the memory that ranks use in training."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from ringmaster.codec import to_json
from ringmaster.features.fp8.job import Float8
from ringmaster.features.quantized_base.job import QuantizedBase
from ringmaster.techniques import AdaptationSpec, Adapter, ModelSpec, OptimizerSpec
from ringmaster.techniques.data import prepare
from ringmaster.techniques.models.facts import model_facts
from tests.integration.kinds import MODELS, job_of
from tests.integration.workbench import ADAMW, LLAMA, VIT, Layout
from tests.matrix import matrix

WITHIN = 0.05
DEEP = replace(LLAMA, config={**LLAMA.config, "num_hidden_layers": 7})
LARGER = ModelSpec(
    architecture="LlamaForCausalLM",
    config={
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
)
MIXTURE = ModelSpec(
    architecture="MixtralForCausalLM", config={**LARGER.config, "num_local_experts": 4, "num_experts_per_tok": 2}
)
TENSOR = {"micro_batch": 8, "sequence_parallel": True, "loss_parallel": True}
MESH = {"reshard": True, "sequence_parallel": False, "loss_parallel": False}

QUICK = [
    (DEEP, Layout("single")),
    (VIT, Layout("single", 1, {"micro_batch": 4})),
    (LARGER, Layout("fsdp", 2, {"reshard": True})),
]
REST = [
    (DEEP, Layout("single", 1, {"recompute": "full", "micro_batch": 2})),
    (LARGER, Layout("ddp", 2, {"micro_batch": 2})),
    (LARGER, Layout("single", 1, {"recompute": "selective"})),
    (LARGER, Layout("zero1", 2)),
    (LARGER, Layout("zero2", 2, {"bucket_bytes": 1 << 18})),
    (LARGER, Layout("zero2", 2, {"bucket_bytes": 1 << 18, "micro_batch": 2, "every_micro_batch": True})),
    (LARGER, Layout("fsdp", 2, {"reshard": False, "micro_batch": 2})),
    (LARGER, Layout("fsdp", 4, {"reshard": True, "num_replicas": 2})),
    (LARGER, Layout("fsdp_static", 2, {"reshard": True})),
    (LARGER, Layout("tensor", 2, TENSOR)),
    (LARGER, Layout("tensor", 4, {**TENSOR, "micro_batch": 4, "recompute": "full", "sequence_parallel": False})),
    (LARGER, Layout("context", 2, {"micro_batch": 8, "exchange": "ulysses", "sharded": False})),
    (LARGER, Layout("pipeline", 2, {"micro_batch": 2, "schedule": "1f1b"})),
    (LARGER, Layout("pipeline", 2, {"micro_batch": 2, "schedule": "zero_bubble"})),
    (LARGER, Layout("pipeline", 4, {"micro_batch": 2, "schedule": "gpipe"})),
    (LARGER, Layout("mesh", 4, {**MESH, "pp": 1, "dp_shard": 2, "tp": 2, "micro_batch": 4})),
    (LARGER, Layout("mesh", 4, {**MESH, "pp": 2, "dp_shard": 2, "tp": 1, "micro_batch": 2})),
    (LARGER, Layout("mesh", 4, {**MESH, "pp": 2, "dp_shard": 1, "tp": 2, "micro_batch": 4})),
    (MIXTURE, Layout("single")),
    (MIXTURE, Layout("fsdp", 2, {"reshard": True})),
    (MIXTURE, Layout("expert", 2, {"reshard": True})),
]

OF_KINDS = [(kind, layout) for kind in MODELS for layout in (Layout("single"), Layout("fsdp", 2, {"reshard": True}))]


def _name(case):
    return f"{case[0].architecture}-{case[1]}"


def answer(bench, target, argument, *, event):
    channel = bench.server.spawn(
        target=f"tests.integration.measuring:{target}", argument=argument, log=bench.cache_dir / "measuring.log"
    )
    return channel, event


def heard(channel, event):
    try:
        while (said := channel.receive())["event"] not in (event, "exit"):
            pass
        assert said["event"] == event, "see measuring.log"
        return said
    finally:
        channel.close()


def predicted_and_measured(bench, tmp_path, model, layout, **changes):
    job = bench.job(model, **{"optimizer": ADAMW, "clip_grad_norm": 1.0, **changes})
    order = bench.order(job, layout, tmp_path)
    data = prepare(job.data, cache_dir=bench.cache_dir)
    (tmp_path / "gang").mkdir(parents=True)
    argument = {
        "choices": [(layout.technique, dict(order.config), layout.num_devices)],
        "job": to_json(job),
        "data": to_json(data),
        "facts": to_json(
            model_facts(job.model, data=data, adapter=job.adapter, frozen=job.freeze, base_changes=job.base_changes)
        ),
        "cache_dir": str(tmp_path),
    }
    said = heard(*answer(bench, "forecast", argument, event="forecast"))
    ranks = [
        answer(bench, "measure", {**to_json(order), "rank": rank}, event="measured")
        for rank in range(1 if layout.technique == "single" else layout.num_devices)
    ]
    measured = [heard(*rank) for rank in ranks]
    return said["forecasts"][0], *(max(m[key] for m in measured) for key in ("peak_bytes", "copied_bytes"))


def assert_foretold(technique, forecast, peak_bytes, copied_bytes, *, within=WITHIN):
    assert forecast["source"] == "rehearsed", forecast["message"]
    assert forecast["device_bytes"] == pytest.approx(peak_bytes, rel=within)
    if technique == "zero2":  # zero2 assigns buckets to ranks by an exchange at run time: the estimate assumes the most
        assert copied_bytes <= forecast["host_bytes"] <= 1.5 * copied_bytes
    else:
        assert forecast["host_bytes"] == pytest.approx(copied_bytes, rel=WITHIN)


@pytest.mark.parametrize("case", QUICK, ids=_name)
def test_the_peak_is_foretold(bench, tmp_path, case):
    assert_foretold(case[1].technique, *predicted_and_measured(bench, tmp_path, *case))


@pytest.mark.parametrize("layout", matrix([REST[1][1], Layout("single"), QUICK[2][1]], quick=[]))
def test_the_peak_of_a_base_in_4_bits_is_foretold(bench, tmp_path, layout):
    changes = {"adapter": Adapter(rank=4), "features": (QuantizedBase(quantize_base="nf4"),)}
    assert_foretold(layout.technique, *predicted_and_measured(bench, tmp_path, LARGER, layout, **changes))


@pytest.mark.skipif(find_spec("torchao") is None, reason="the extra torchao is not installed")
@pytest.mark.parametrize("layout", matrix([REST[1][1], Layout("single")], quick=[]))
@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16", "features": (Float8(emulate=True),)},
        {"features": (AdaptationSpec(kind="quantization-aware", method="dynamic-int8-int4"),)},
    ],
    ids=["fp8", "int4"],
)
def test_the_peak_of_layers_that_round_is_foretold(bench, tmp_path, layout, changes):
    assert_foretold(layout.technique, *predicted_and_measured(bench, tmp_path, LARGER, layout, **changes))


@pytest.mark.full
@pytest.mark.parametrize("case", REST, ids=_name)
def test_the_peak_is_foretold_under_every_technique(bench, tmp_path, case):
    assert_foretold(case[1].technique, *predicted_and_measured(bench, tmp_path, *case))


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": OptimizerSpec(name="adafactor")},
        {"optimizer": OptimizerSpec(name="lion")},
        {"optimizer": OptimizerSpec(name="muon")},
        {"freeze": ("*", "!lm_head.*")},
        {"freeze": ("model.embed_tokens.*", "model.layers.0.*", "model.layers.1.*")},
    ],
    ids=["adafactor", "lion", "muon", "head", "upper-layers"],
)
@pytest.mark.parametrize("layout", [REST[1][1], REST[6][1], REST[9][1], REST[12][1]], ids=str)
def test_the_peak_of_other_optimizers_and_frozen_parameters_is_foretold(bench, tmp_path, layout, changes):
    found = predicted_and_measured(bench, tmp_path, LARGER, layout, **changes)
    assert_foretold(layout.technique, *found, within=0.08)  # `tensor` with a head alone is estimated 6 % too high


@pytest.mark.parametrize(("kind", "layout"), matrix(OF_KINDS, quick=[], ids=lambda case: f"{case[0]}-{case[1]}"))
def test_the_peak_is_foretold_of_every_kind_of_data(bench, tmp_path, kind, layout):
    """Of samples that are padded to one length: an estimate is one of the longest samples."""
    job = job_of(bench, kind, tmp_path)
    wide = replace(job.data, padding="max_length")
    found = predicted_and_measured(bench, tmp_path / "wide", job.model, layout, data=wide)
    assert_foretold(layout.technique, *found)
