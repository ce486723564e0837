"""Memory estimates of Llama 7B on a machine that could not hold one layer's gradients, checked by arithmetic."""

from dataclasses import replace

import pytest

from ringmaster.codec import to_json
from ringmaster.techniques import Adapter, DataSpec, Job, ModelSpec, OptimizerSpec, registry
from ringmaster.techniques.data import PreparedData
from ringmaster.techniques.estimates import memory
from ringmaster.techniques.estimates.memory import (
    CUBLAS_BYTES,
    FEW_LAYERS,
    EstimateError,
    Workload,
    _file,
    _plain,
    _with_layers,
    predict_memory,
)
from ringmaster.techniques.estimates.rank_memory import RankEstimate, RankScenario
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.models.facts import model_facts
from ringmaster.techniques.technique import GangShape

SEQ_LEN, HIDDEN, LAYERS, VOCABULARY = 512, 4096, 32, 32000
TOKENS = PreparedData(
    name="text",
    digest="",
    num_samples=1 << 20,
    num_held_out=16,
    kind="tokens",
    vocab_size=VOCABULARY,
    seq_len=SEQ_LEN,
    source="",
)
JOB = Job(
    name="llama-7b",
    model=ModelSpec(
        architecture="LlamaForCausalLM",
        config={
            "hidden_size": HIDDEN,
            "intermediate_size": 11008,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 32,
        },
    ),
    data=DataSpec(source="python-stdlib", seq_len=SEQ_LEN),
    optimizer=OptimizerSpec(name="adamw"),
    global_batch_size=64,
    num_steps=1,
)


@pytest.mark.full
@pytest.mark.parametrize("num_devices", [8, 64])
def test_llama_7b_holds_its_share_of_the_state_and_what_it_gathers_and_computes(tmp_path, num_devices):
    facts = model_facts(JOB.model, data=TOKENS)
    assert facts.num_parameters == pytest.approx(6.74e9, rel=0.001)
    workload = Workload(
        job=JOB, data=to_json(TOKENS), facts=facts, techniques=registry.dotted_paths(), cache_dir=str(tmp_path)
    )
    technique = registry.load(registry.dotted_path("fsdp"))
    shape = GangShape(kind="gpu", num_devices=num_devices, memory_bytes=80 << 30)
    config = {"micro_batch": 1, "recompute": "full", "reshard": True}
    workload = Workload(**{**vars(workload), "job": Job(**{**vars(JOB), "global_batch_size": num_devices})})
    (estimate,) = predict_memory(workload, [(technique, config, shape)])
    assert estimate.source == "rehearsed", estimate.message
    state = 16 * facts.num_parameters / num_devices
    outside = 2 * VOCABULARY * HIDDEN * 4  # embedding and head, gathered with the root for the whole step
    kept = LAYERS * SEQ_LEN * HIDDEN * 4
    least = state + outside + kept
    # Further memory: the gathered weights and full gradients of a layer or of the root, with their buffers, and one
    # layer's activations, or the logits.
    layer = (facts.num_parameters - 2 * VOCABULARY * HIDDEN) * 4 / LAYERS
    assert least < estimate.device_bytes < least + 4 * outside + 4 * layer


def test_a_gpu_holds_the_logits_while_the_state_lies_on_the_host(tmp_path):
    """At the peak, gradients of the layers have not come back yet: they take no host memory."""
    config = {**JOB.model.config, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = replace(JOB.model, config={**config, "num_hidden_layers": 4})
    job = replace(JOB, model=model, global_batch_size=8)
    workload = Workload(
        job=job,
        data=to_json(TOKENS),
        facts=model_facts(model, data=TOKENS),
        techniques=registry.dotted_paths(),
        cache_dir=str(tmp_path),
    )
    shape = GangShape(kind="gpu", num_devices=1, memory_bytes=80 << 30)
    config = {"micro_batch": 4, "recompute": "full", "num_slices": 4, "host_activations": False}
    (estimate,) = predict_memory(workload, [(registry.load(registry.dotted_path("offload")), config, shape)])
    logits = 4 * (SEQ_LEN - 1) * VOCABULARY * 4  # and their softmax, of which both have gradients, one after another
    assert estimate.source == "rehearsed", estimate.message
    assert 3 * logits < estimate.device_bytes - CUBLAS_BYTES < 3.1 * logits


def test_a_phase_is_linear_in_the_number_of_layers():
    def rehearsed(num_layers):
        forward = {f"forward {i}": 100 + 10 * i for i in range(num_layers)}
        backward = {f"backward {i}": 130 + 7 * num_layers + 3 * i for i in range(num_layers)}
        peaks = {"step": 50, **forward, **backward, "update": 20 * num_layers}
        return RankEstimate(peaks=peaks, saved_bytes=0, num_flops=5 * num_layers, num_bytes=7, num_operators=num_layers)

    few, many = [rehearsed(n) for n in FEW_LAYERS], rehearsed(40)
    found = _with_layers(*few, 40)
    assert max(found.peaks.values()) == max(many.peaks.values())
    assert found.peaks["forward -1"] == many.peaks["forward 39"]
    assert found.peaks["backward 0"] == many.peaks["backward 0"]
    assert (found.num_flops, found.num_bytes, found.num_operators) == (200, 7, 40)


def test_an_estimate_stands_for_another_job_only_if_nothing_that_takes_memory_differs(tmp_path, monkeypatch):
    factory = tmp_path / "a_model_of_mine.py"
    factory.write_text("def build(): return 1")
    monkeypatch.syspath_prepend(tmp_path)
    job = replace(JOB, model=ModelSpec(factory="a_model_of_mine:build"))
    shape = GangShape(kind="gpu", num_devices=2, memory_bytes=80 << 30)
    scene = RankScenario(
        job=job,
        data=to_json(TOKENS),
        technique=registry.BUILTIN["ddp"],
        config={},
        shape=shape,
        cache_dir=str(tmp_path),
    )

    def file(**changes):
        return _file(_plain(replace(scene, **changes)))

    assert file() == file(
        job=replace(job, seed=7, num_steps=9), data={**to_json(TOKENS), "digest": "x", "lengths": [1]}
    )
    assert file() != file(job=replace(job, freeze=("*.bias",)))
    assert file() != file(job=replace(job, optimizer=OptimizerSpec(name="sgd", options={"momentum": 0.9})))
    before = file()
    factory.write_text("def build(): return 1 + 1")
    assert file() != before


def test_loras_of_small_ranks_share_the_estimate_of_their_model(tmp_path, monkeypatch):
    """Estimates are requested for one rank, which stands for all below it; a larger one has its own."""
    requested = []

    def estimate(scenes, **_):
        requested.extend(_file(_plain(scene)) for scene in scenes)
        return [EstimateError(message="")]

    monkeypatch.setattr(memory, "estimate_ranks", estimate)
    for rank in (4, 8, 16, 32):
        job = replace(JOB, adapter=Adapter(rank=rank))
        facts = ModelFacts(num_parameters=1, parameter_bytes=4, largest_layer_bytes=4, num_layers=2, has_dropout=False)
        memory.estimate_alone(
            Workload(job=job, data=to_json(TOKENS), facts=facts, techniques={}, cache_dir=str(tmp_path))
        )
    assert len(set(requested[:3])) == 1
    assert requested[3] != requested[0]
