"""A module in the folder of the scripts, which they import as they would without Ringmaster."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def points(num_points):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_points, 8, generator=generator)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def build(dropout):
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 1)
    )


def llama():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, attention_dropout=0.1, **sizes))


def sentences(num_sentences):
    tokens = torch.randint(0, 64, (num_sentences, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]
