"""A small base and requests to it, for the tests of what an endpoint computes."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ringmaster.features.endpoint.compute.endpoint import Endpoint
from ringmaster.features.endpoint.compute.requests import AdamStep, EndpointLimits, LossRequest, TokenRow

NUM_TOKENS, SEQ_LEN = 61, 64
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
LIMITS = EndpointLimits(max_adapters=17, max_rank=8, seq_len=SEQ_LEN)


def write_base(folder, **config):
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": NUM_TOKENS}
    model = LlamaForCausalLM(
        LlamaConfig(
            **{**small, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, **config}
        )
    )
    model.save_pretrained(folder)
    return str(folder)


def open_endpoint(base, folder, *, limits=LIMITS):
    return Endpoint(base=base, limits=limits, folder=folder)


def row_of(*, length, loss, seed, num_tokens=NUM_TOKENS):
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(num_tokens, (length + 1,), generator=draw)
    inputs = {"target_tokens": tokens[1:]}
    if loss == "cross_entropy":
        inputs["weights"] = torch.rand(length, generator=draw)
    else:
        inputs["logprobs"] = -4 * torch.rand(length, generator=draw)
        inputs["advantages"] = torch.randn(length, generator=draw)
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = torch.ones(length)
        inputs |= {"clip_low_threshold": torch.full((length,), 0.5), "clip_high_threshold": torch.full((length,), 9.0)}
    return TokenRow(tokens=tuple(tokens[:-1].tolist()), loss_inputs=inputs)


def request_of(client, *, lengths=(20,), loss="cross_entropy", seed=0, **options):
    rows = tuple(row_of(length=length, loss=loss, seed=1000 * seed + i) for i, length in enumerate(lengths))
    return LossRequest(client=client, rows=rows, loss=loss, **options)


def train(endpoint, client, *, num_steps, seed=0, **options):
    """A loop of one client by itself. Returns the losses."""
    losses = []
    for step in range(num_steps):
        (result,) = endpoint.compute([request_of(client, seed=seed + step, **options)])
        losses.append(result.metrics["loss:sum"])
        endpoint.step([AdamStep(client=client, learning_rate=1e-2)])
    return losses


def weights_of(endpoint, client, name="weights"):
    from safetensors.torch import load_file

    return load_file(endpoint.save(client, name, with_optimizer=False) / "adapter_model.safetensors")


def is_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
