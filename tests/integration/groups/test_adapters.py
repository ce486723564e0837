"""Adapters train alike under every technique, and peft loads what is saved."""

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from ringmaster.codec import to_json
from ringmaster.features.adaptation.rewriting import EvaluationOrder
from ringmaster.features.quantized_base.job import QuantizedBase
from ringmaster.features.quantized_base.layers import quantize_base
from ringmaster.techniques import Adapter, registry
from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore
from ringmaster.techniques.checkpoints.storage import checkpoint_steps
from ringmaster.techniques.data import prepare
from ringmaster.techniques.estimates.job_preflight import why_no_adaptation
from ringmaster.techniques.models.adapter_modules import merge
from ringmaster.techniques.models.adapters import attach
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.export import export_checkpoint, export_model
from ringmaster.techniques.models.facts import model_facts
from tests.integration.evaluating import evaluate_model
from tests.integration.workbench import (
    ADAMW,
    GPT2,
    LLAMA,
    RESNET,
    SGD,
    SINGLE,
    VIT,
    Layout,
    is_bit_equal,
    largest_difference,
    weights_in,
)
from tests.matrix import matrix

LORA = Adapter(rank=4)
IN_4_BITS = QuantizedBase(quantize_base="nf4")
IA3 = Adapter(kind="ia3")
PREFIX = Adapter(kind="prefix", num_virtual_tokens=4)
PROMPT = Adapter(kind="prompt", num_virtual_tokens=4)
KINDS = [LORA, IA3, PREFIX]
DORA = replace(LORA, dora=True)
FURTHER = {
    "dora": DORA,
    "dropout": replace(LORA, dropout=0.3),
    "dora-dropout": replace(DORA, dropout=0.3),
    "pissa": replace(LORA, initialization="pissa"),
    "pissa-quick": replace(LORA, initialization="pissa_niter_16"),
    "olora": replace(LORA, initialization="olora"),
    "prompt": PROMPT,
}
PLAIN_MESH = {"reshard": False, "sequence_parallel": False, "loss_parallel": False}
EVERYWHERE = [
    Layout("single", 1, {"micro_batch": 3}),
    Layout("single", 1, {"recompute": "full"}),
    Layout("single", 1, {"recompute": "selective"}),
    Layout("ddp", 2, {"micro_batch": 2}),
    Layout("zero1", 2),
    Layout("zero2", 2, {"bucket_bytes": 1 << 10, "micro_batch": 2}),
    Layout("fsdp", 2, {"reshard": True, "recompute": "full"}),
    Layout("fsdp", 2, {"reshard": False, "micro_batch": 2}),
    Layout("fsdp_static", 2, {"reshard": True}),
    Layout("offload", 1, {"num_slices": 2, "recompute": "full", "host_activations": True}),
    Layout("offload", 1, {"num_slices": 2, "micro_batch": 3}),
]
CUT = [
    Layout("tensor", 2, {"micro_batch": 8, "sequence_parallel": True, "loss_parallel": True}),
    Layout("tensor", 2, {"micro_batch": 4, "sequence_parallel": False, "loss_parallel": False}),
    Layout("context", 2, {"micro_batch": 8, "exchange": "all_gather", "sharded": False}),
    Layout("context", 2, {"micro_batch": 3, "exchange": "all_gather", "sharded": True}),
    Layout("pipeline", 2, {"micro_batch": 2, "schedule": "1f1b"}),
    Layout("mesh", 4, {"micro_batch": 4, "pp": 1, "dp_shard": 2, "tp": 2, **PLAIN_MESH}),
    Layout("mesh", 4, {"micro_batch": 2, "pp": 2, "dp_shard": 2, "tp": 1, **PLAIN_MESH}),
]
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LARGEST_DIFFERENCE = {"sgd": 2e-7, "adamw": 1e-4}
LARGEST_LOSS_DIFFERENCE = {"sgd": 2e-6, "adamw": 5e-6}


def assert_trains_the_same(bench, job, layout, folder):
    trained, expected = bench.train(job, layout, folder), bench.reference(job)
    # PiSSA and OLoRA begin with larger values, whose last digits are larger.
    within = LARGEST_DIFFERENCE[job.optimizer.name] * (10 if job.adapter.subtracts else 1)
    assert largest_difference(trained.weights, expected.weights) <= within
    assert trained.losses == pytest.approx(expected.losses, rel=0, abs=LARGEST_LOSS_DIFFERENCE[job.optimizer.name])
    assert trained.outcome.result.metrics == pytest.approx(expected.outcome.result.metrics, abs=1e-5)


def facts(bench, job):
    return model_facts(job.model, data=prepare(job.data, cache_dir=bench.cache_dir), adapter=job.adapter)


# A batch that is divided over two ranks is trained below, with DoRA.
@pytest.mark.parametrize("layout", matrix([EVERYWHERE[3], CUT[0]], quick=CUT[:1]))
def test_a_lora_is_trained_alike(bench, tmp_path, layout):
    assert_trains_the_same(bench, bench.job(adapter=LORA, clip_grad_norm=0.05), layout, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("adapter", "layout"), [(PREFIX, EVERYWHERE[6]), (IA3, CUT[0])], ids=["prefix", "ia3"])
def test_other_kinds_too(bench, tmp_path, adapter, layout):
    assert_trains_the_same(bench, bench.job(adapter=adapter), layout, tmp_path)


@pytest.mark.parametrize("name", matrix([*FURTHER], quick=["dora"], ids=str))
@pytest.mark.parametrize("layout", matrix([*EVERYWHERE, *CUT], quick=[EVERYWHERE[6]]))
def test_further_kinds_are_trained_alike_or_refused(bench, tmp_path, layout, name):
    job = bench.job(adapter=FURTHER[name], techniques=(layout.technique,))
    technique = registry.load(layout.path)
    if why_no_adaptation(technique, job) or technique.supports(job, bench.shape(layout.num_devices), bench.facts(job)):
        assert layout in CUT
        return
    assert_trains_the_same(bench, job, layout, tmp_path)
    plain = bench.reference(replace(job, adapter=replace(LORA if job.adapter.kind == "lora" else PREFIX)))
    assert bench.reference(job).losses[1:] != plain.losses[1:]


@pytest.mark.parametrize("name", matrix(["pissa", "olora", "dora", "prompt"], quick=["pissa"]))
def test_peft_loads_further_kinds_on_the_base_as_it_was(bench, tmp_path, name):
    from peft import PeftModel  # imports bitsandbytes, which takes a second

    base = bench.reference(bench.job(optimizer=ADAMW)).order.model_dir
    job = bench.job(adapter=FURTHER[name], optimizer=replace(ADAMW, lr=0.02), base="base")
    trained = bench.train(job, SINGLE, tmp_path, weights_from=base)
    theirs = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), tmp_path / "model").eval()
    data = prepare(job.data, cache_dir=bench.cache_dir)
    ours = build_model(job.model, data=data, seed=0, weights_from=Path(base))
    ours = attach(ours, Adapter(from_pretrained=str(tmp_path / "model")), seed=0).eval()
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        expected, found = theirs(input_ids=tokens).logits, ours(input_ids=tokens).logits
    assert torch.allclose(expected[:, -12:], found, atol=1e-5)
    order = EvaluationOrder(
        job=job,
        data=to_json(data),
        model_dir=trained.order.model_dir,
        slot=replace(bench.slot(0), cores=()),
        cache_dir=str(bench.cache_dir),
    )
    assert evaluate_model(order) == pytest.approx(trained.outcome.result.metrics, abs=1e-5)
    if name != "prompt":
        assert torch.allclose(merge(ours)(input_ids=tokens).logits, found, atol=1e-5)


@pytest.mark.parametrize("layout", matrix([*EVERYWHERE, *CUT], quick=[EVERYWHERE[6]]))
def test_an_adapter_of_a_base_in_4_bits_is_trained_alike_or_refused(bench, tmp_path, layout):
    pytest.importorskip("bitsandbytes")
    job = bench.job(adapter=LORA, features=(IN_4_BITS,), techniques=(layout.technique,))
    technique = registry.load(layout.path)
    if why_no_adaptation(technique, job) or technique.supports(job, bench.shape(layout.num_devices), bench.facts(job)):
        assert not technique.takes_packed_weights or version("torch") < "2.13"
        return
    assert_trains_the_same(bench, job, layout, tmp_path)
    assert bench.reference(job).losses[0] != bench.reference(job.without(QuantizedBase)).losses[0]


def test_the_bytes_of_a_base_in_4_bits_are_those_that_torch_allocates(bench):
    wide = replace(LLAMA, config={**LLAMA.config, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4})
    job = bench.job(wide, adapter=LORA, features=(IN_4_BITS,))
    data = prepare(job.data, cache_dir=bench.cache_dir)
    model = attach(quantize_base(build_model(wide, data=data, seed=0), LORA), LORA, seed=0)
    storages = [each.untyped_storage() for each in (*model.parameters(), *model.buffers())]
    allocated = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    facts = model_facts(wide, data=data, adapter=LORA, base_changes={"quantize_base": "nf4"})
    assert facts.parameter_bytes == pytest.approx(allocated, rel=0.01)
    assert facts.parameter_bytes < 0.4 * model_facts(wide, data=data, adapter=LORA).parameter_bytes


def test_a_base_in_4_bits_is_what_is_evaluated_scored_and_merged(bench, tmp_path):
    pytest.importorskip("bitsandbytes")
    base = bench.reference(bench.job(optimizer=ADAMW)).order.model_dir
    job = bench.job(adapter=LORA, features=(IN_4_BITS,), optimizer=replace(ADAMW, lr=0.02), base="base")
    trained = bench.train(job, SINGLE, tmp_path, weights_from=base)
    data, folder = prepare(job.data, cache_dir=bench.cache_dir), Path(trained.order.model_dir)
    order = EvaluationOrder(
        job=job, data=to_json(data), model_dir=str(folder), slot=replace(bench.slot(0), cores=()),
        cache_dir=str(bench.cache_dir),
    )  # fmt: skip
    expected = trained.outcome.result.metrics
    assert evaluate_model(order) == pytest.approx(expected, abs=1e-6)
    merged = build_model(job.model, data=data, seed=0, weights_from=folder)
    export_model(tmp_path / "merged", spec=job.model, model=merged, state=merged.state_dict(), prepared=data)
    whole = replace(order, job=replace(job.without(QuantizedBase), adapter=None), model_dir=str(tmp_path / "merged"))
    assert evaluate_model(whole) == pytest.approx(expected, abs=1e-5)
    silent = replace(order, job=job.without(QuantizedBase))  # the adapter's file says on what it was trained
    assert evaluate_model(silent) == pytest.approx(expected, abs=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("adapter", KINDS, ids=lambda adapter: adapter.kind)
@pytest.mark.parametrize("layout", [*EVERYWHERE, *CUT], ids=str)
def test_every_layout_trains_every_adapter_alike(bench, tmp_path, layout, adapter, optimizer):
    job = bench.job(adapter=adapter, optimizer=optimizer, techniques=(layout.technique,))
    if registry.load(layout.path).supports(job, bench.shape(layout.num_devices), facts(bench, job)):
        assert adapter.kind == "prefix"
        assert layout in CUT
        return
    assert_trains_the_same(bench, job, layout, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("layout", [EVERYWHERE[2], EVERYWHERE[3], EVERYWHERE[6]], ids=str)
@pytest.mark.parametrize("model", [GPT2, VIT], ids=["gpt2", "vit"])
def test_other_architectures_too(bench, tmp_path, layout, model):
    adapter = replace(LORA, modules_to_save=("classifier",)) if model is VIT else LORA
    assert_trains_the_same(bench, bench.job(model, adapter=adapter), layout, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "interleaved", "gpipe"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_every_schedule_of_a_pipeline(bench, tmp_path, schedule, recompute):
    deep = replace(LLAMA, config={**LLAMA.config, "num_hidden_layers": 4})
    layout = Layout("pipeline", 2, {"micro_batch": 2, "schedule": schedule, "recompute": recompute})
    assert_trains_the_same(bench, bench.job(deep, adapter=LORA), layout, tmp_path)


@pytest.mark.parametrize("layout", CUT, ids=str)
def test_a_prefix_is_refused_where_heads_layers_or_tokens_are_divided(bench, layout):
    job = bench.job(adapter=PREFIX)
    reason = registry.load(layout.path).supports(job, bench.shape(layout.num_devices), facts(bench, job))
    assert "prefix" in reason


@pytest.mark.full
def test_checkpoints_hold_the_adapter_alone_and_move_between_techniques(bench, tmp_path):
    job = bench.job(adapter=LORA, optimizer=ADAMW)
    bench.train(job, Layout("fsdp", 2, {"reshard": True}), tmp_path, last_step=2)
    newest = CheckpointStore(tmp_path / "checkpoints").newest()
    assert all("lora_" in name for name in newest.manifest.tensors)
    bench.train(job, Layout("tensor", 2, CUT[0].config), tmp_path, last_step=4)
    trained, expected = bench.train(job, SINGLE, tmp_path), bench.reference(job)
    assert trained.outcome.result.first_step == 4
    assert largest_difference(trained.weights, expected.weights) <= 1e-5


@pytest.mark.parametrize("adapter", matrix(KINDS, quick=KINDS[:1], ids=lambda adapter: adapter.kind))
def test_the_same_option_resumed_is_bit_equal(bench, tmp_path, adapter):
    job = bench.job(adapter=adapter, optimizer=ADAMW)
    bench.train(job, SINGLE, tmp_path, last_step=3)
    assert is_bit_equal(bench.train(job, SINGLE, tmp_path).weights, bench.reference(job).weights)


def test_the_base_stays_as_it_is_and_the_loss_falls(bench, tmp_path):
    """Without falling losses, the other tests of this file would hold for a trainer that does nothing."""
    base = bench.reference(bench.job(optimizer=ADAMW))
    adapter = replace(LORA, targets=(*LINEAR, "lm_head"))
    job = bench.job(adapter=adapter, optimizer=replace(ADAMW, lr=0.02), num_steps=20)
    trained = bench.train(job, SINGLE, tmp_path, weights_from=base.order.model_dir)
    assert trained.losses[-1] < trained.losses[0] - 0.1
    said = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == base.order.model_dir
    assert sorted(said["target_modules"]) == sorted(adapter.targets)


@pytest.mark.parametrize("adapter", matrix(KINDS, quick=[LORA], ids=lambda adapter: adapter.kind))
def test_peft_loads_what_is_saved_and_what_peft_saves_is_trained_on(bench, tmp_path, adapter):
    from peft import PeftModel  # imports bitsandbytes, which takes a second

    base = bench.reference(bench.job(optimizer=ADAMW)).order.model_dir
    job = bench.job(adapter=adapter, optimizer=replace(ADAMW, lr=0.02))
    trained = bench.train(job, SINGLE, tmp_path / "first", weights_from=base)
    theirs = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), trained.order.model_dir).eval()
    tokens = torch.arange(36).reshape(3, 12)
    ours = attach(LlamaForCausalLM.from_pretrained(base), Adapter(from_pretrained=trained.order.model_dir), seed=0)
    assert torch.equal(ours.eval()(tokens).logits, theirs(tokens).logits)
    plain = LlamaForCausalLM.from_pretrained(base)(tokens).logits
    assert float((plain - theirs(tokens).logits).detach().abs().max()) > 1e-4

    theirs.save_pretrained(tmp_path / "theirs")
    further = bench.job(adapter=Adapter(from_pretrained=str(tmp_path / "theirs")), optimizer=SGD)
    once = bench.train(further, SINGLE, tmp_path / "second", weights_from=base)
    again = replace(further, adapter=Adapter(from_pretrained=trained.order.model_dir))
    assert is_bit_equal(once.weights, bench.train(again, SINGLE, tmp_path / "third", weights_from=base).weights)
    assert not is_bit_equal(once.weights, trained.weights)


def test_a_model_without_linear_modules_is_refused_with_what_to_do(bench):
    with pytest.raises(ValueError, match=r"no linear modules in repeated layers.*To fix"):
        facts(bench, bench.job(RESNET, adapter=LORA))


@pytest.mark.parametrize("adapter", matrix(KINDS, quick=[IA3], ids=lambda adapter: adapter.kind))
def test_an_adapter_is_evaluated_and_taken_from_any_checkpoint(bench, tmp_path, adapter):
    base = bench.reference(bench.job(optimizer=ADAMW)).order.model_dir
    job = bench.job(adapter=adapter, optimizer=replace(ADAMW, lr=0.02))
    trained = bench.train(job, SINGLE, tmp_path, weights_from=base)
    order = EvaluationOrder(
        job=job,
        data=to_json(prepare(job.data, cache_dir=bench.cache_dir)),
        model_dir=trained.order.model_dir,
        slot=replace(bench.slot(0), cores=()),
        cache_dir=str(bench.cache_dir),
    )
    assert evaluate_model(order) == pytest.approx(trained.outcome.result.metrics, abs=1e-6)
    root = str(tmp_path / "checkpoints")
    (name,) = checkpoint_steps(root).values()
    export_checkpoint(root, name, finished=Path(trained.order.model_dir), folder=tmp_path / "again")
    assert is_bit_equal(weights_in(tmp_path / "again"), trained.weights)
