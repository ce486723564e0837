"""Exported adapters: peft adapts and saves the same modules as the adapter here."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    BertConfig,
    BertForTokenClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from ringmaster.techniques import Adapter
from ringmaster.techniques.models.adapters import (
    attach,
    saved_modules,
    sites,
    trained_names,
    unambiguous_targets,
)
from ringmaster.techniques.models.peft_format import ADAPTER_CONFIG, ADAPTER_WEIGHTS, config_of, tensor_name

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


def bert(of, **config):
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return of(BertConfig(**SMALL, **still, num_labels=3, initializer_range=0.3, **config))


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 40}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def vit():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3))


def lora(*targets, saved=()):
    return Adapter(rank=2, targets=targets, modules_to_save=saved)


def saved_adapter(folder, make, adapter, *, base=None):
    """Saves an adapter, with made-up weights, into a folder. Returns the plain model, and the model with it."""
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
    said = config_of(adapter, model=plain, base=base, targets=targets, feedforward=feedforward, saved=saved)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(said))
    trained = {tensor_name(name): value.detach() for name, value in ours.named_parameters() if name in names}
    save_file(trained, folder / ADAPTER_WEIGHTS)
    return plain, ours


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

    plain, ours = saved_adapter(tmp_path, make, adapter)
    with torch.no_grad():
        found = ours(TOKENS).logits
        assert not torch.allclose(plain(TOKENS).logits, found, atol=1e-2)
        theirs = PeftModel.from_pretrained(plain, tmp_path).eval()
        assert torch.allclose(theirs(input_ids=TOKENS).logits, found, atol=1e-6)


IDS = {"input_ids": TOKENS}


@pytest.mark.parametrize(
    ("make", "adapter", "task", "loaded_by", "inputs"),
    [
        (llama, lora("q_proj"), "CAUSAL_LM", "AutoPeftModelForCausalLM", IDS),
        (roberta, lora("query", saved=("classifier",)), "SEQ_CLS", "AutoPeftModelForSequenceClassification", IDS),
        (roberta, lora("query"), None, "AutoPeftModel", IDS),
        (
            lambda: LlamaForSequenceClassification(LlamaConfig(**SMALL, num_labels=3, pad_token_id=0)),
            lora("q_proj", saved=("score",)),
            "SEQ_CLS",
            "AutoPeftModelForSequenceClassification",
            IDS,
        ),
        (
            lambda: bert(BertForTokenClassification),
            lora("query", saved=("classifier",)),
            "TOKEN_CLS",
            "AutoPeftModelForTokenClassification",
            IDS,
        ),
        (t5, lora("q", "v"), "SEQ_2_SEQ_LM", "AutoPeftModelForSeq2SeqLM", {**IDS, "labels": TOKENS[:, :5].clone()}),
        (lambda: bert(BertModel), lora("query"), "FEATURE_EXTRACTION", "AutoPeftModelForFeatureExtraction", IDS),
        (
            vit,
            lora("q_proj", saved=("classifier",)),
            None,
            "AutoPeftModel",
            {"pixel_values": torch.linspace(-1, 1, 384).reshape(2, 3, 8, 8)},
        ),
    ],
    ids=[
        "causal",
        "trained head",
        "head as it was",
        "causal classifier",
        "token classifier",
        "encoder-decoder",
        "encoder",
        "images",
    ],
)
def test_the_class_of_peft_for_its_task_loads_it(tmp_path, make, adapter, task, loaded_by, inputs):
    import peft  # local, as above

    base, folder = tmp_path / "base", tmp_path / "adapter"
    folder.mkdir()
    plain, ours = saved_adapter(folder, make, adapter, base=str(base))
    plain.save_pretrained(base)
    assert json.loads((folder / ADAPTER_CONFIG).read_text())["task_type"] == task
    theirs = getattr(peft, loaded_by).from_pretrained(folder, low_cpu_mem_usage=False).eval()
    with torch.no_grad():
        found, expected, before = (model(**inputs) for model in (theirs, ours, plain))
    name = "logits" if hasattr(found, "logits") else "last_hidden_state"
    assert torch.allclose(found[name], expected[name], atol=1e-6)
    assert not torch.allclose(before[name], expected[name], atol=1e-3)
