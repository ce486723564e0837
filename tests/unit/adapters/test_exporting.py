"""Exported adapters: peft adapts and saves the same modules as the adapter here."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, RobertaConfig, RobertaForSequenceClassification

from ringmaster.techniques import Adapter
from ringmaster.techniques.adapters.attaching import attach, saved_modules, sites, trained_names, unambiguous_targets
from ringmaster.techniques.adapters.peft_format import CONFIG, WEIGHTS, config_of, tensor_name

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}
TOKENS = torch.arange(24).reshape(2, 12) + 3


def llama():
    return LlamaForCausalLM(LlamaConfig(**SMALL))


def roberta():
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return RobertaForSequenceClassification(RobertaConfig(**SMALL, **still, num_labels=3, initializer_range=0.3))


def lora(*targets, saved=()):
    return Adapter(rank=2, targets=targets, modules_to_save=saved)


@pytest.mark.parametrize(
    ("make", "adapter"),
    [
        (roberta, lora("query", "value")),
        (roberta, lora("query", "value", "dense", saved=("classifier",))),
        (roberta, lora("query", saved=("classifier",))),
        (llama, lora("q_proj", saved=("norm",))),
        (llama, lora("q_proj", "lm_head", saved=("lm_head",))),
        (llama, lora(saved=("mlp",))),
        (
            llama,
            Adapter(kind="ia3", targets=("model.layers.0.self_attn.v_proj", "down_proj"), feedforward=("down_proj",)),
        ),
    ],
    ids=["no head", "targets in a head", "head", "norm", "target and saved", "all but saved", "feedforward"],
)
def test_peft_adapts_and_saves_the_same_modules(tmp_path, make, adapter):
    from peft import PeftModel  # local: the import takes seconds, and each test process imports all files

    torch.manual_seed(0)
    plain = make().eval()
    ours = attach(copy.deepcopy(plain), adapter, seed=0)
    names = trained_names(ours)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name in names:
                parameter.add_(0.3 * torch.randn_like(parameter))
    targets, feedforward = unambiguous_targets(plain, sites(plain, adapter))
    saved = saved_modules(plain, adapter)
    said = config_of(adapter, model=plain, base=None, targets=targets, feedforward=feedforward, saved=saved)
    (tmp_path / CONFIG).write_text(json.dumps(said))
    trained = {tensor_name(name): value.detach() for name, value in ours.named_parameters() if name in names}
    save_file(trained, tmp_path / WEIGHTS)
    with torch.no_grad():
        found = ours(TOKENS).logits
        assert not torch.allclose(plain(TOKENS).logits, found, atol=1e-2)
        theirs = PeftModel.from_pretrained(plain, tmp_path).eval()
        assert torch.allclose(theirs(input_ids=TOKENS).logits, found, atol=1e-6)
