import sys

import pytest

from ringmaster.techniques.data import PreparedData
from ringmaster.techniques.job_specs import ModelSpec

USERS = '''
import torch
from torch import nn

class Tied(nn.Module):
    """A tiny language model with one matrix at both ends, which computes its own mean loss."""

    def __init__(self, width=8, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = self.dropout(block(x).relu())
        logits = self.head(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"logits": logits, "loss": loss}

class Looks(nn.Module):
    """Reads values while it is built, which tensors without data have not."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        assert self.scale.sum().item() == 3

    def forward(self, **columns): return columns["x"] * self.scale

def tied(**kwargs): return Tied(**kwargs)
def looks(): return Looks()
def stack(): return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
def nothing(): return 3
def summed(output, batch): return output["logits"].sum(), len(batch["input_ids"])
def mean(output, batch): return output["logits"].mean()
'''

TOKENS = PreparedData(
    name="words", digest="w", num_samples=9, num_held_out=3, kind="tokens", vocab_size=64, seq_len=12,
    end_of_text_id=0, source="memory",
)  # fmt: skip
IMAGES = PreparedData(
    name="shapes", digest="s", num_samples=9, num_held_out=3, kind="images", num_labels=5, image_size=8,
    num_channels=1, source="memory",
)  # fmt: skip

LLAMA = ModelSpec(
    architecture="LlamaForCausalLM",
    config={"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
)
GPT2 = ModelSpec(architecture="GPT2LMHeadModel", config={"n_embd": 16, "n_layer": 2, "n_head": 2})
VIT = ModelSpec(
    architecture="ViTForImageClassification",
    config={
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 2,
    },
)
RESNET = ModelSpec(
    architecture="ResNetForImageClassification",
    config={"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
)
FOUR = [(LLAMA, TOKENS), (GPT2, TOKENS), (VIT, IMAGES), (RESNET, IMAGES)]


@pytest.fixture
def users(tmp_path, monkeypatch):
    """The name of a module with a user's models and losses."""
    (tmp_path / "mine_models.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "mine_models"
    sys.modules.pop("mine_models", None)
