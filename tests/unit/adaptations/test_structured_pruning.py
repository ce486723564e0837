"""Structured pruning: which layers and channels a smaller model is made of, and what it cannot be made of."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from ringmaster.errors import StepError
from ringmaster.features.adaptation.structured_pruning import narrow, tensor_sources
from ringmaster.techniques import DataSpec, Job, ModelSpec, registry
from ringmaster.techniques.estimates.job_preflight import preflight_job
from ringmaster.techniques.job import AdaptationSpec
from ringmaster.techniques.models.architectures import kept_layers
from ringmaster.techniques.preflight_result import PreflightOrder
from ringmaster.techniques.technique import GangShape

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2}
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_head": 2, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
LLAMA = SIZES | {"num_key_value_heads": 1}


def llama(**config):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LLAMA | {"num_hidden_layers": 5, "intermediate_size": 24} | config)).eval()


def bert(**config):
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(**SIZES | {"num_hidden_layers": 5, "intermediate_size": 24} | config)
    ).eval()


def gpt2(**config):
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**GPT2 | {"n_layer": 5, "n_inner": 24} | config)).eval()


@pytest.mark.parametrize(("num_layers", "num_kept", "kept"), [(5, 3, [0, 2, 4]), (4, 1, [0]), (2, 2, [0, 1])])
def test_layers_are_kept_at_equal_distances(num_layers, num_kept, kept):
    assert kept_layers(num_layers, num_kept) == kept


def test_kept_layers_have_their_weights_and_all_else_is_as_it_was():
    whole, small = llama(), llama(num_hidden_layers=3)
    narrow(whole, small)
    theirs = whole.state_dict()
    for name, tensor in small.state_dict().items():
        source = name.replace("layers.1.", "layers.2.") if "layers.1." in name else name.replace("layers.2", "layers.4")
        assert torch.equal(tensor, theirs[source]), name


@pytest.mark.parametrize(
    ("build", "width", "into", "out_of"),
    [
        (llama, "intermediate_size", ("gate_proj", "up_proj"), ("down_proj",)),
        (bert, "intermediate_size", ("intermediate.dense",), (".output.dense",)),
        (gpt2, "n_inner", ("c_fc",), ("mlp.c_proj",)),
    ],
)
def test_a_model_without_channels_that_do_nothing_computes_the_same(build, width, into, out_of):
    whole, small = build(), build(**{width: 16})
    is_transposed = build is gpt2  # whose matrices are [inputs, outputs]
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in whole.named_parameters():
            ends_in = any(part in name for part in into)
            if not ends_in and not any(part in name for part in out_of):
                continue
            if "attention" in name or (not ends_in and tensor.dim() == 1):
                continue
            layer = int(next(part for part in name.split(".") if part.isdecimal()))
            dead = torch.randperm(24, generator=draw.manual_seed(layer))[:8]  # others in each layer
            dim = 0 if tensor.dim() == 1 else int(ends_in == is_transposed)
            tensor.index_fill_(dim, dead, 0.0)
    narrow(whole, small)
    ids = torch.randint(40, (2, 6), generator=draw)
    with torch.no_grad():
        assert torch.allclose(small(input_ids=ids).logits, whole(input_ids=ids).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"num_hidden_layers": 6}, "is missing"),
        ({"intermediate_size": 32}, "more channels"),
        ({"hidden_size": 8}, "hidden_size differs"),
        ({"num_attention_heads": 1}, "num_attention_heads differs"),
        ({"vocab_size": 30}, "lm_head.weight is"),
    ],
)
def test_what_is_no_part_of_the_larger_model_is_refused(changed, fault):
    with pytest.raises(ValueError, match=fault):
        tensor_sources(llama(), llama(**changed))


def test_joined_matrices_are_refused():
    sizes = LLAMA | {"num_hidden_layers": 2, "pad_token_id": 0}
    models = [Phi3ForCausalLM(Phi3Config(**sizes, intermediate_size=width)) for width in (24, 16)]
    with pytest.raises(ValueError, match="more than one width"):
        tensor_sources(*models)


def test_a_model_that_is_no_part_of_its_base_is_refused_before_it_is_planned(tmp_path):
    llama(vocab_size=300).save_pretrained(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "row {n} of some words"}}\n' for n in range(200)))
    config = {**LLAMA, "vocab_size": 300, "num_hidden_layers": 6, "intermediate_size": 24}
    job = Job(
        name="a",
        model=ModelSpec(architecture="LlamaForCausalLM", config=config),
        data=DataSpec(path=str(tmp_path / "rows.jsonl"), kind="language-modeling", seq_len=16, vocab_size=300),
        base="larger",
        num_steps=0,
        features=(AdaptationSpec(kind="pruned", method="structured"),),
    )
    order = PreflightOrder(
        jobs=(job,),
        shapes=(GangShape(kind="cpu", num_devices=1, memory_bytes=1 << 33),),
        techniques={"rewrite": registry.dotted_path("rewrite")},
        cache_dir=str(tmp_path / "cache"),
        weights={"a": str(tmp_path / "base")},
    )
    with pytest.raises(StepError, match=r"structured pruning: .* is missing"):
        preflight_job(job, order)
