"""The technique for groups is known by name, and is offered to no single job."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ringmaster.codec import from_json, to_json
from ringmaster.techniques import Adapter, registry
from ringmaster.techniques.data import prepare
from ringmaster.techniques.estimates.job_preflight import preflight_job
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_specs import DataSpec, ModelSpec
from ringmaster.techniques.models.facts import model_facts
from ringmaster.techniques.multi_adapter.adapter_batches import AdapterBatch
from ringmaster.techniques.multi_adapter.adapter_runs import AdapterModules
from ringmaster.techniques.multi_adapter.multi_adapter_base import MultiAdapterBase
from ringmaster.techniques.preflight_result import PreflightOrder
from ringmaster.techniques.processes.order import GangOrder, Slot
from ringmaster.techniques.shared_base import SharedBase
from ringmaster.techniques.single import Single
from ringmaster.techniques.technique import GangShape
from ringmaster.techniques.training.fused.group_requirements import grouping_obstacle

LLAMA = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
JOB = Job(
    name="a",
    model=ModelSpec(architecture="LlamaForCausalLM", config=LLAMA),
    data=DataSpec(source="python-stdlib", seq_len=16),
    global_batch_size=2,
    num_steps=3,
)


def test_the_registry_knows_it_by_name_alone():
    path = registry.dotted_path("shared_base")
    assert isinstance(registry.load(path), SharedBase)
    assert "shared_base" in registry.names()
    assert "shared_base" not in registry.dotted_paths()


def test_nobody_can_take_its_name():
    class Taken(Single):
        name = "shared_base"

    with pytest.raises(ValueError, match=r"'shared_base' is ringmaster\.techniques\.shared_base:SharedBase already"):
        registry.register(Taken)


def test_a_survey_says_why_it_is_nothing_for_a_job_by_itself(tmp_path):
    (tmp_path / "text.txt").write_text("two words\n" * 200)
    job = replace(JOB, data=DataSpec(path=str(tmp_path / "text.txt"), seq_len=8, vocab_size=300))
    order = PreflightOrder(
        jobs=(job,),
        shapes=(GangShape(kind="cpu", num_devices=1, memory_bytes=1 << 33),),
        techniques=registry.dotted_paths(),
        cache_dir=str(tmp_path),
    )
    preflight = preflight_job(replace(job, techniques=("single", "shared_base")), order)
    assert {candidate.technique for candidate in preflight.candidates} == {"single"}
    reasons = {refusal.technique: refusal.reason for refusal in preflight.refusals}
    assert reasons["shared_base"] == "trains groups of jobs, not a single job"
    unsaid = preflight_job(job, order)
    assert "shared_base" not in {refusal.technique for refusal in unsaid.refusals}


def masked(rows=8):
    """A data set whose samples have attention masks."""
    tokens = torch.arange(rows * 6).view(rows, 6) % 11
    samples = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in tokens]
    return Samples(samples), Samples(samples[:2])


class Samples(list):
    vocab_size = 11


@pytest.mark.parametrize(("factory", "is_told"), [("masked", True), (None, False)])
def test_samples_with_more_than_tokens_are_nothing_for_groups(tmp_path, factory, is_told):
    (tmp_path / "text.txt").write_text("two words\n" * 200)
    text = DataSpec(path=str(tmp_path / "text.txt"), seq_len=8, vocab_size=300)
    data = DataSpec(factory=f"{__name__}:{factory}") if factory else text
    job = replace(JOB, data=data, adapter=Adapter(rank=2))
    order = PreflightOrder(
        jobs=(job,),
        shapes=(GangShape(kind="cpu", num_devices=1, memory_bytes=1 << 33),),
        techniques=registry.dotted_paths(),
        cache_dir=str(tmp_path),
    )
    facts = preflight_job(replace(job, techniques=("single",)), order).facts
    reason = grouping_obstacle([job, replace(job, name="b")], facts)
    assert (reason is not None and "samples have attention_mask besides their tokens" in reason) is is_told


def test_a_base_that_packs_samples_refuses_what_it_would_not_read():
    base = LlamaForCausalLM(LlamaConfig(**LLAMA, vocab_size=11))
    tokens = torch.ones(1, 6, dtype=torch.long)
    part = AdapterBatch(adapter_modules=AdapterModules(), inputs={"input_ids": tokens, "attention_mask": tokens})
    with pytest.raises(ValueError, match="samples have attention_mask besides their tokens"):
        MultiAdapterBase(base).forward([part])


@pytest.mark.parametrize("loss", [None, "package.module:function"])
def test_a_loss_that_the_model_computes_is_nothing_for_groups(tmp_path, loss):
    """For the rows of a group, such a loss would be one number for all jobs."""
    (tmp_path / "text.txt").write_text("two words\n" * 200)
    data = prepare(DataSpec(path=str(tmp_path / "text.txt"), seq_len=8, vocab_size=300), cache_dir=tmp_path)
    config = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    asking = ModelSpec(architecture="BertForQuestionAnswering", config={**config, **NO_DROPOUT})
    jobs = [replace(JOB, name=name, model=asking, adapter=Adapter(rank=2), loss=loss) for name in "ab"]
    facts = model_facts(asking, data=data)
    reason = grouping_obstacle(jobs, facts)
    assert (reason is not None and "a loss that its model computes on its own" in reason) is (loss is None)
    assert not model_facts(JOB.model, data=data).computes_loss


def test_an_order_with_fellows_goes_through_json():
    slot = Slot(kind="cpu", index=0)
    order = GangOrder(
        purpose="train", job=JOB, technique="t", config={}, slots=(slot,), folder="f", cache_dir="c", last_step=3
    )
    order = replace(order, members=(replace(order, job=replace(JOB, name="b"), last_step=2),))
    assert from_json(GangOrder, to_json(order)) == order
