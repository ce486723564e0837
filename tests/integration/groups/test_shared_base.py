"""Adapters that are trained together on one base end as in separate runs: bit-equal on a CPU in fp32."""

import math
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ringmaster.techniques import Adapter, ModelSpec, OptimizerSpec, ScheduleSpec
from ringmaster.techniques.data import prepare
from ringmaster.techniques.job_specs import ParameterGroup
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.facts import model_facts
from ringmaster.techniques.multi_adapter.multi_adapter_base import MultiAdapterBase
from ringmaster.techniques.training.fused.group import FusedGroup
from ringmaster.techniques.training.fused.group_requirements import grouping_obstacle
from ringmaster.techniques.training.fused.member import GroupMember
from tests.integration.workbench import (
    ADAMW,
    GPT2,
    GPT2_WITH_DROPOUT,
    LLAMA,
    SGD,
    SINGLE,
    VIT,
    is_bit_equal,
    largest_difference,
    weights_in,
)
from tests.matrix import matrix

# On some processors, a base's product of fewer rows uses another kernel alone than among the rows of other jobs.
FEWEST_ROWS = 4
LORA = Adapter(rank=4)
IA3 = Adapter(kind="ia3")
PREFIX = Adapter(kind="prefix", num_virtual_tokens=3)
OWN = {"GPT2LMHeadModel": ("lm_head", "ln_f"), "ViTForImageClassification": ("classifier", "projection")}
FEEDFORWARD = {"GPT2LMHeadModel": ("c_attn", "mlp.c_proj"), "ViTForImageClassification": ("q_proj", "mlp.fc2")}


@pytest.fixture(scope="module")
def base(bench):
    """A folder with the weights that all adapters leave unchanged."""
    torch.set_num_threads(1)  # as in the gangs that train one job
    return bench.reference(bench.job(optimizer=ADAMW)).order.model_dir


def several(bench):
    """Jobs that differ in every setting in which members of a group may differ."""
    job = bench.job(base="stem", adapter=LORA, optimizer=replace(ADAMW, lr=0.01))
    return [
        replace(job, name="plain"),
        replace(job, name="slow", optimizer=ADAMW, seed=1, schedule=ScheduleSpec(name="cosine", warmup_steps=2)),
        replace(job, name="clipped", clip_grad_norm=0.01, seed=2, num_steps=7),
        replace(job, name="thin", adapter=replace(LORA, rank=2, alpha=3.0), num_steps=3),
        replace(job, name="thick", adapter=replace(LORA, rank=16, rank_stabilised=True), global_batch_size=4),
        replace(job, name="sgd", optimizer=replace(SGD, options={"momentum": 0.9, "weight_decay": 0.01})),
        replace(job, name="few", adapter=replace(LORA, targets=("q_proj", "lm_head")), global_batch_size=2),
        replace(job, name="long", data=replace(job.data, seq_len=40), global_batch_size=3),
        replace(job, name="tiny", data=replace(job.data, seq_len=5), global_batch_size=1),
        replace(job, name="lion", optimizer=OptimizerSpec(name="lion", lr=1e-3, options={"weight_decay": 0.1})),
        replace(job, name="by-name", optimizer=replace(ADAMW, groups=(ParameterGroup(match="*.lora_B.*", lr=0.02),))),
        replace(job, name="decayed", optimizer=OptimizerSpec(lr=0.02, options={"betas": [0.8, 0.9]}), seed=3),
        *degenerate(job),
        *scaled(job),
        *with_own_modules(job),
        *prefixed(job),
    ]


def degenerate(job):
    """Jobs whose products are too small for a batched kernel: of rank 1, alone and with another, and of two tokens."""
    hair = replace(job, adapter=replace(LORA, rank=1))
    brief = replace(job, adapter=replace(LORA, rank=3), data=replace(job.data, seq_len=3), global_batch_size=1)
    return [
        replace(hair, name="hair"),
        replace(hair, name="hair-too", seed=7),
        replace(hair, name="hair-alone", data=replace(job.data, seq_len=11)),
        replace(brief, name="brief", clip_grad_norm=0.01),
        replace(brief, name="brief-too", seed=8),
    ]


def prefixed(job):
    """Prefix adapters: two of one length, one of another length, and one before samples of another length."""
    return [
        replace(job, name="prefix", adapter=PREFIX, clip_grad_norm=0.01),
        replace(job, name="prefix-too", adapter=PREFIX, optimizer=SGD, seed=6, global_batch_size=3),
        replace(job, name="prefix-long", adapter=replace(PREFIX, num_virtual_tokens=9), num_steps=4),
        replace(job, name="prefix-short", adapter=PREFIX, data=replace(job.data, seq_len=7), global_batch_size=2),
    ]


def with_own_modules(job):
    """Adapters with fully trained modules: heads, embeddings, norms, and layers that other jobs adapt."""
    heady = replace(LORA, targets=("q_proj",), modules_to_save=("lm_head", "norm"))
    inside = replace(
        LORA, targets=("v_proj",), modules_to_save=("layers.0.self_attn.q_proj", "post_attention_layernorm")
    )
    return [
        replace(job, name="own-head", adapter=heady, clip_grad_norm=0.01),
        replace(job, name="own-head-too", adapter=heady, optimizer=SGD, seed=5),
        replace(job, name="own-words", adapter=replace(IA3, modules_to_save=("embed_tokens",)), num_steps=4),
        replace(job, name="own-layers", adapter=inside, global_batch_size=3, clip_grad_norm=0.02),
    ]


def scaled(job):
    """(IA)3 adapters: two equal ones, and others that scale further layers, or layers that a LoRA adapts too."""
    heady = replace(IA3, targets=("q_proj", "o_proj", "lm_head"), feedforward=("o_proj", "lm_head"))
    return [
        replace(job, name="scales", adapter=IA3),
        replace(job, name="scales-too", adapter=IA3, optimizer=SGD, seed=4, clip_grad_norm=0.01),
        replace(job, name="scales-a-head", adapter=heady, global_batch_size=3, num_steps=4),
        replace(job, name="scales-briefly", adapter=IA3, data=replace(job.data, seq_len=7), global_batch_size=1),
    ]


def group_of(bench, jobs, folder, *, weights_from, recompute="none", **orders):
    orders = [bench.order(job, SINGLE, folder / job.name, weights_from=weights_from, **orders) for job in jobs]
    first = orders[0]
    member_free = build_model(first.job.model, data=prepared(bench, first.job), seed=0, weights_from=Path(weights_from))
    group = FusedGroup(MultiAdapterBase(member_free, recompute=recompute))
    members = [GroupMember(order, group.stem.model, device=torch.device("cpu")) for order in orders]
    return group, members


def prepared(bench, job):
    return prepare(job.data, cache_dir=bench.cache_dir)


def run(group, members):
    """Steps the group until every member is done; returns the losses of each."""
    losses = {member.name: [] for member in members}
    for member in members:
        group.join(member)
    while group.members:
        for name, report in group.step().items():
            losses[name].append(report.loss)
        for member in [m for m in group.members if m.next_step >= m.order.last_step]:
            group.remove_member(member)
    return losses


@pytest.mark.parametrize("recompute", matrix(["none", "full"], quick=[]))
def test_each_adapter_ends_as_alone(bench, base, tmp_path, recompute):
    jobs = several(bench)
    group, members = group_of(bench, jobs, tmp_path / "group", weights_from=base, recompute=recompute)
    losses = run(group, members)
    metrics = group.evaluate(members)
    for job, member in zip(jobs, members, strict=True):
        member.save(member.order.checkpoint_dir)
        member.export(Path(member.order.model_dir), member.order.checkpoint_dir)
        alone = bench.train(job, SINGLE, tmp_path / job.name, weights_from=base)
        weights = weights_in(tmp_path / "group" / job.name / "model")
        if job.global_batch_size * (job.data.seq_len - 1) < FEWEST_ROWS:
            assert losses[job.name] == pytest.approx(alone.losses, rel=1e-6), job.name
            assert largest_difference(weights, alone.weights) < 1e-4, job.name
            continue
        assert losses[job.name] == alone.losses, job.name
        assert is_bit_equal(weights, alone.weights), job.name
        assert metrics[job.name] == alone.outcome.result.metrics, job.name


def test_a_lora_where_another_scales_what_several_layers_read(bench, base, tmp_path):
    """Both adapters add to the gradient of those inputs, in the order of a separate run."""
    job = bench.job(base="stem", adapter=LORA, optimizer=replace(ADAMW, lr=0.01), global_batch_size=2)
    scales = replace(IA3, targets=("q_proj", "v_proj"), feedforward=("q_proj",))
    jobs = [replace(job, name="lora"), replace(job, name="too", seed=1), replace(job, name="scales", adapter=scales)]
    group, members = group_of(bench, jobs, tmp_path / "group", weights_from=base)
    losses = run(group, members)
    for one, member in zip(jobs, members, strict=True):
        alone = bench.train(one, SINGLE, tmp_path / one.name, weights_from=base)
        assert losses[one.name] == alone.losses, one.name
        assert is_bit_equal(state_of(member), state_in(alone)), one.name


@pytest.mark.full
@pytest.mark.parametrize(("model", "largest"), [(GPT2, 0.0), (VIT, 1e-4)], ids=["gpt2", "vit"])
def test_other_architectures_too(bench, tmp_path, model, largest):
    """Covers transposed layers, and stacked samples, whose heads see one row each: too few for bit-equality."""
    base = bench.reference(bench.job(model, optimizer=ADAMW)).order.model_dir
    job = bench.job(model, adapter=LORA, optimizer=replace(ADAMW, lr=0.01), num_steps=3)
    targets = FEEDFORWARD[model.architecture]
    scales = replace(IA3, targets=targets, feedforward=targets[1:])
    jobs = [
        replace(job, name="a"),
        replace(job, name="b", seed=1),
        replace(job, name="c", global_batch_size=3),
        replace(job, name="d", adapter=scales),
        replace(job, name="e", adapter=scales, seed=1),
        replace(job, name="f", adapter=replace(LORA, modules_to_save=OWN[model.architecture]), seed=1),
        replace(job, name="g", adapter=replace(scales, modules_to_save=OWN[model.architecture]), clip_grad_norm=0.01),
    ]
    if model is GPT2:
        jobs.append(replace(job, name="h", adapter=PREFIX, seed=2))
    group, members = group_of(bench, jobs, tmp_path / "group", weights_from=base)
    losses = run(group, members)
    for one, member in zip(jobs, members, strict=True):
        alone = bench.train(one, SINGLE, tmp_path / one.name, weights_from=base)
        assert losses[one.name] == pytest.approx(alone.losses, rel=0, abs=1e-6)
        assert largest_difference(state_of(member), state_in(alone)) <= largest


@pytest.mark.full
def test_prefixes_of_stacked_samples_too(bench, tmp_path):
    """A sliding window makes a model attend in a way that samples packed into one row cannot reproduce."""
    model = ModelSpec(architecture="MistralForCausalLM", config={**LLAMA.config, "sliding_window": 8})
    base = bench.reference(bench.job(model, optimizer=ADAMW)).order.model_dir
    job = bench.job(model, adapter=LORA, optimizer=replace(ADAMW, lr=0.01), num_steps=3)
    jobs = [replace(job, name="plain"), *prefixed(job)]
    group, members = group_of(bench, jobs, tmp_path / "group", weights_from=base)
    assert not group.stem.packs
    losses = run(group, members)
    for one, member in zip(jobs, members, strict=True):
        alone = bench.train(one, SINGLE, tmp_path / one.name, weights_from=base)
        assert losses[one.name] == pytest.approx(alone.losses, rel=0, abs=1e-6)
        assert largest_difference(state_of(member), state_in(alone)) <= 1e-5


@pytest.mark.full
@pytest.mark.parametrize("precision", matrix(["bf16", "bf16-params"], quick=["bf16-params"]))
def test_in_bf16_up_to_its_rounding(bench, base, tmp_path, precision):
    """The summation order of bf16 kernels may differ, and with it their rounding."""
    some = ("plain", "clipped", "thin", "scales", "own-head", "prefix")
    jobs = [replace(job, precision=precision) for job in several(bench) if job.name in some]
    group, members = group_of(bench, jobs, tmp_path / "group", weights_from=base)
    exact = [replace(job, precision="fp32") for job in jobs]
    plain, of_plain = group_of(bench, exact, tmp_path / "plain", weights_from=base)
    losses, in_fp32 = run(group, members), run(plain, of_plain)
    for job in jobs:
        alone = bench.train(job, SINGLE, tmp_path / job.name, weights_from=base)
        assert losses[job.name] == pytest.approx(alone.losses, rel=0, abs=1e-3)
        assert losses[job.name] != in_fp32[job.name]
    group, (half, whole) = group_of(bench, [jobs[0], exact[1]], tmp_path / "mixed", weights_from=base)
    group.join(half)
    with pytest.raises(ValueError, match="group of their own"):
        group.join(whole)


def test_one_joins_when_another_leaves(bench, base, tmp_path):
    jobs = [*several(bench)[:3], scaled(several(bench)[0])[0]]
    group, (first, second, third, late) = group_of(bench, jobs, tmp_path / "group", weights_from=base)
    for member in (first, second, third):
        group.join(member)
    group.step()
    group.remove_member(second)  # before its last step
    group.step()
    group.join(late)
    while group.members:
        group.step()
        for member in [m for m in group.members if m.next_step >= m.order.last_step]:
            group.remove_member(member)
    for member in (first, third, late):
        assert is_bit_equal(
            state_of(member), state_in(bench.train(member.job, SINGLE, tmp_path / member.name, weights_from=base))
        )
    assert second.next_step == 1


def test_one_that_has_left_leaves_no_memory_behind(bench, base, tmp_path):
    """The number of jobs at once bounds the memory, however many join one after another."""
    group, members = group_of(bench, several(bench)[:4], tmp_path, weights_from=base)
    for member in members[:3]:
        group.join(member)
    group.step()
    group.remove_member(members[1])
    group.join(members[3])
    group.step()
    matrices = [weakref.ref(parameter) for parameter in members[1].tree.parameters()]
    del member, members[1]
    assert matrices and all(matrix() is None for matrix in matrices)


@pytest.mark.full
def test_a_checkpoint_moves_to_and_from_a_separate_run(bench, base, tmp_path):
    plain = several(bench)[0]
    jobs = [*several(bench)[:3], *scaled(plain)[:2], *with_own_modules(plain)[1:3], *prefixed(plain)[:2]]
    folder = tmp_path / "group"
    for job in jobs:
        bench.train(job, SINGLE, folder / job.name, weights_from=base, last_step=1)
    group, members = group_of(bench, jobs, folder, weights_from=base, last_step=3)
    assert [member.restore(member.order.checkpoint_dir) for member in members] == [1] * 9
    run(group, members)
    for job, member in zip(jobs, members, strict=True):
        member.save(member.order.checkpoint_dir)
        ended = bench.train(job, SINGLE, folder / job.name, weights_from=base)
        assert ended.outcome.result.first_step == 3
        alone = bench.train(job, SINGLE, tmp_path / job.name, weights_from=base)
        assert is_bit_equal(ended.weights, alone.weights)


@pytest.mark.parametrize("spoilt", matrix(["slow", "scales-too", "own-head", "prefix"], quick=[]))
def test_a_nan_in_one_adapter_never_touches_another(bench, base, tmp_path, spoilt):
    plain = several(bench)[0]
    jobs = [*several(bench)[:4], *scaled(plain)[:2], *with_own_modules(plain)[:2], *prefixed(plain)[:2]]
    group, members = group_of(bench, jobs, tmp_path / "group", weights_from=base)
    (spoilt,) = (member for member in members if member.name == spoilt)
    with torch.no_grad():
        next(iter(spoilt.tree.parameters())).fill_(math.nan)
    for member in members:
        group.join(member)
    reports = group.step()
    assert math.isnan(reports[spoilt.name].loss)
    assert spoilt.next_step == 0  # it was not updated
    group.remove_member(spoilt)
    while group.members:
        group.step()
        for member in [m for m in group.members if m.next_step >= m.order.last_step]:
            group.remove_member(member)
    for member in members:
        if member is not spoilt:
            alone = bench.train(member.job, SINGLE, tmp_path / member.name, weights_from=base)
            assert is_bit_equal(state_of(member), state_in(alone))


def state_of(member):
    return {name: parameter.detach() for name, parameter in member.tree.named_parameters()}


def state_in(trained):
    return {name.removeprefix("base_model.model."): value for name, value in trained.weights.items()}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"adapter": None}, "trains no adapter"),
        ({"precision": "bf16"}, "another precision"),
        ({"compile": True}, "is compiled"),
        ({"exact": True}, "exact: true"),
        ({"techniques": ("single", "ddp")}, "by single, ddp alone"),
        ({"base": "other"}, "another base"),
        ({"seed": 5}, "another seed"),
        ({"model": GPT2_WITH_DROPOUT}, "another base"),
    ],
    ids=["full", "bf16", "compiled", "exact", "techniques", "base", "seed", "model"],
)
def test_what_cannot_be_trained_together_says_why(bench, changes, reason):
    job = bench.job(adapter=LORA)
    facts = model_facts(job.model, data=prepared(bench, job))
    headed = {"adapter": replace(LORA, modules_to_save=("lm_head",))}
    for may in ({"techniques": ("single", "shared_base")}, {"adapter": IA3}, {"adapter": PREFIX}, headed):
        assert grouping_obstacle([job, replace(job, **may)], facts) is None
    assert reason in grouping_obstacle([job, replace(job, **changes)], facts)


def test_modules_that_cannot_be_a_samples_own_are_refused(bench):
    job = bench.job(GPT2, adapter=replace(LORA, modules_to_save=("wpe",)))
    facts = model_facts(job.model, data=prepared(bench, job), adapter=job.adapter)
    assert "wpe, which it trains as it is, is of class Embedding" in grouping_obstacle(
        [job, replace(job, name="b")], facts
    )


def test_fresh_heads_of_other_seeds_are_not_trained_together(bench, base):
    job = bench.job(ModelSpec(from_pretrained=base), adapter=LORA)
    facts = model_facts(job.model, data=prepared(bench, job))
    assert grouping_obstacle([job, replace(job, seed=1)], facts) is None
    fresh = replace(job, model=replace(job.model, config={"num_labels": 3}))
    assert "another seed" in grouping_obstacle([fresh, replace(fresh, seed=1)], facts)
