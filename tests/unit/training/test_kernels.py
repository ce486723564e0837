"""Other kernels are used where their steps agree with plain ones, and wrong ones are refused whatever is wrong."""

import random
from functools import partial

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, AutoModelForImageClassification
from transformers.models.gpt2 import GPT2Config
from transformers.models.llama import LlamaConfig
from transformers.models.vit import ViTConfig

from ringmaster.features.kernels import trainer as module
from ringmaster.features.kernels.job import Numerics
from ringmaster.features.kernels.trainer import (
    kernel_choices,
    optimizer_kernels,
    sampled_updates,
    use_kernels,
    why_kernels_differ,
)
from ringmaster.techniques import DataSpec, Job, ModelSpec, OptimizerSpec
from ringmaster.techniques.training.optimizers import build_optimizer
from tests.matrix import matrix

TOLERANCE, NUM_DRAWN = 1e-5, 100
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
GPT2 = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=32, **NO_DROPOUT)
VIT = ViTConfig(
    image_size=8, patch_size=2, num_channels=1, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=5,
)  # fmt: skip


def built(config):
    torch.manual_seed(0)
    cls = AutoModelForImageClassification if config is VIT else AutoModelForCausalLM
    return cls.from_config(config, attn_implementation="sdpa").train()


def batch_of(config, step):
    draw = torch.Generator().manual_seed(step)
    if config is VIT:
        return {
            "pixel_values": torch.randn(4, 1, 8, 8, generator=draw),
            "labels": torch.randint(5, (4,), generator=draw),
        }
    tokens = torch.randint(97, (4, 12), generator=draw)
    lengths = torch.randint(4 + 4 * step, 9 + 4 * step, (4, 1), generator=draw)
    mask = (torch.arange(12) < lengths).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def sample(model, config, step):
    model.zero_grad(set_to_none=True)
    loss = model(**batch_of(config, step)).loss
    loss.backward()
    return float(loss.detach()), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def refusal(model, config, use):
    step = partial(sample, model, config)
    return why_kernels_differ("tried", plain=step, use=use, other=step, tolerance=TOLERANCE)


def nothing():
    return None


# What may be wrong with a kernel. Each takes the model and a draw, and makes the model wrong.


def parts_of(model, draw):
    kinds = (nn.Linear, nn.LayerNorm, nn.modules.linear.Identity)
    parts = [part for part in model.modules() if isinstance(part, kinds) or "RMSNorm" in type(part).__name__]
    return draw.choice([part for part in parts if part is not getattr(model, "lm_head", None)])


def scaled(model, draw):
    factor = 1 + draw.choice([1e-4, -1e-4, 1e-3])
    parts_of(model, draw).register_forward_hook(lambda _, args, output: output * factor)


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, factor):
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def scaled_gradient(model, draw):
    factor = 1 + draw.choice([1e-4, -1e-4, 1e-3])
    parts_of(model, draw).register_forward_hook(lambda _, args, output: ScaledGradient.apply(output, factor))


def rounded(model, draw):
    parts_of(model, draw).register_forward_hook(lambda _, args, output: output.bfloat16().float())


def cut_off(model, draw):
    """A part of a gradient is never computed."""
    column = draw.randrange(4)

    def detach(_, args, output):
        return torch.cat(
            [output[..., :column], output[..., column : column + 1].detach(), output[..., column + 1 :]], -1
        )

    parts_of(model, draw).register_forward_hook(detach)


def stale_mask(model, draw):
    if "image" in type(model).__name__.lower():  # it has none
        scaled(model, draw)
        return
    first = {}

    def replace(_, args, kwargs):
        first.setdefault("mask", kwargs["attention_mask"])
        return args, {**kwargs, "attention_mask": first["mask"]}

    model.register_forward_pre_hook(replace, with_kwargs=True)


WRONG_ATTENTION = {
    "drops a token": lambda scores, draw: scores.index_fill(-1, torch.tensor([draw["at"]]), -1e9),
    "sees the next token": lambda scores, draw: scores.masked_fill(draw["next"], 0.0),
    "scales": lambda scores, draw: scores * (1 + 1e-3),
    "rounds": lambda scores, draw: scores.bfloat16().float(),
    "drops scores": lambda scores, draw: scores.masked_fill(draw["dropped"], -1e9),
}


def wrong_attention(model, draw):
    wrong, at, seed = draw.choice(sorted(WRONG_ATTENTION)), draw.randrange(3), draw.randrange(1000)
    if "image" in type(model).__name__.lower() and wrong == "sees the next token":
        wrong = "rounds"

    def attend(module, query, key, value, attention_mask, scaling=None, **_):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask, -1e9) if attention_mask.dtype == torch.bool else (
                scores + attention_mask
            )  # fmt: skip
        elif "image" not in type(model).__name__.lower():
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -1e9)
        length = scores.shape[-1]
        drawn = torch.Generator().manual_seed(seed)
        places = {
            "at": at,
            "next": torch.eye(length, dtype=torch.bool).roll(1, 1) & torch.ones(length, length).triu().bool(),
            "dropped": torch.rand(scores.shape, generator=drawn) < 0.02,
        }
        weights = WRONG_ATTENTION[wrong](scores, places).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("wrong", attend)
    model.config._attn_implementation = "wrong"


INJECTIONS = [scaled, scaled_gradient, rounded, cut_off, stale_mask, wrong_attention]


def drawn_injections():
    draw = random.Random(35)
    for number in range(NUM_DRAWN):
        yield draw.choice([LLAMA, GPT2, VIT]), draw.choice(INJECTIONS), random.Random(number)


@pytest.mark.parametrize("part", matrix(range(5), quick=[0]))
def test_a_wrong_kernel_is_refused_in_100_of_100(part):
    accepted = []
    for config, inject, draw in list(drawn_injections())[part::5]:
        model = built(config)

        def use(model=model, inject=inject, draw=draw):
            inject(model, draw)
            return nothing

        if "differs from the plain one by" not in refusal(model, config, use):
            accepted.append((type(model).__name__, inject.__name__))
    assert not accepted


@pytest.mark.parametrize("config", [LLAMA, GPT2, VIT], ids=["llama", "gpt2", "vit"])
def test_attention_computed_otherwise_is_accepted_and_can_be_undone(config):
    model = built(config)
    undo = []

    def use():
        undo.append(use_kernels(model, "attention:eager", device_type="cpu"))
        return undo[0]

    assert refusal(model, config, use) == ""
    assert model.config._attn_implementation == "eager"
    undo[0]()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.full
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_layers_compiled_by_a_backend_without_a_compiler_are_accepted(backend):
    model = built(LLAMA)

    def use():
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, backend=backend, dynamic=False)
        return nothing

    assert refusal(model, LLAMA, use) == ""


def test_what_a_kernel_raises_is_the_reason_and_the_plain_step_stays():
    model = built(LLAMA)
    reason = refusal(model, LLAMA, partial(use_kernels, model, "attention:nonsense", device_type="cpu"))
    assert reason.startswith("kernels tried are left out: ")
    assert model.config._attn_implementation == "sdpa"


def job(optimizer="adamw", **changes):
    model, data = ModelSpec(architecture="LlamaForCausalLM"), DataSpec(source="python-stdlib", seq_len=8)
    momentum = {"momentum": 0.9} if optimizer == "sgd" else {}
    optimizer = OptimizerSpec(name=optimizer, lr=1e-3, options={"weight_decay": 0.1, **momentum})
    plain = {"features": (Numerics(tolerance=TOLERANCE),), "num_steps": 4, "optimizer": optimizer}
    return Job(name="a", model=model, data=data, **{**plain, **changes})


@pytest.mark.parametrize(("optimizer", "name"), [("adamw", "optimizer:foreach"), ("sgd", "optimizer:fused")])
def test_kernels_of_optimizers_are_compared_by_what_they_do_to_weights(optimizer, name):
    model, of = built(LLAMA), job(optimizer)
    before = [p.detach().clone() for p in model.parameters()]

    def updates(kernels, factor, step):
        build = partial(build_optimizer, of, [*model.parameters()], kernels=kernels)

        def wrong():
            made = build()
            made.param_groups[0]["lr"] *= factor
            return made

        return sampled_updates([*model.parameters()], wrong, seed=step, lr=1e-3)

    def why(factor):
        other = partial(updates, optimizer_kernels(name, of), factor)
        return why_kernels_differ(
            name, plain=partial(updates, None, 1.0), use=lambda: nothing, other=other, tolerance=TOLERANCE
        )

    assert why(1.0) == ""
    assert "differs from the plain one" in why(1 + 1e-4)
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))


def test_only_jobs_with_numerics_have_kernels_to_choose_from(monkeypatch):
    assert kernel_choices(job(features=()), device_kind="cpu") == {}
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert kernel_choices(job(), device_kind="cpu") == {
        "compile:default": "compile: true needs a C++ compiler on a CPU. To fix: install g++, or leave `compile` out",
        "attention:eager": "",
        "optimizer:foreach": "",
    }
    on_gpus = kernel_choices(job(), device_kind="gpu")
    assert on_gpus["attention:flash"] == "it computes in bf16 only"
    assert on_gpus["compile:max-autotune-no-cudagraphs"] == on_gpus["attention:flex"] == ""
    assert module.NUM_COMPARED > 1, "one batch shows no stale mask"
