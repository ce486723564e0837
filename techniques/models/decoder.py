"""The structure of a Hugging Face causal language model, for techniques that divide models."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ringmaster.techniques.interface.data_source import PreparedData
from ringmaster.techniques.interface.decoders import CAUSAL
from ringmaster.techniques.interface.model_facts import Decoder, LayerModule


def decoder_of(model: nn.Module, layers: Iterable[nn.Module], data: PreparedData) -> Decoder | None:
    """The description of `model` as a decoder, or None if it is not a causal language model that reads tokens."""
    config, name = getattr(model, "config", None), type(model).__name__
    if config is None or data.kind != "tokens" or data.seq_len is None or not name.endswith(CAUSAL):
        return None
    if getattr(config, "is_encoder_decoder", False) or not hasattr(config, "num_attention_heads"):
        return None
    num_heads = config.num_attention_heads
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    return Decoder(
        architecture=name,
        hidden_size=config.hidden_size,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        vocab_size=config.vocab_size,
        seq_len=data.seq_len,
        window=getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None,
        is_tied=head is not None and head.weight is embedding.weight,
        modules=tuple(dict.fromkeys(module for layer in layers for module in _modules(layer))),
        has_positions=any(tensor.name == "position_ids" for tensor in data.tensors),
    )


def _modules(layer: nn.Module) -> Iterable[LayerModule]:
    for name, module in layer.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if own:
            shape = tuple(own["weight"].shape) if "weight" in own else ()
            yield LayerModule(name=name, kind=type(module).__name__, shape=shape)
