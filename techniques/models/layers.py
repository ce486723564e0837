"""The structure of a model: its repeated layers, its description as a decoder, and the components that a job names."""

from collections.abc import Iterable, Iterator

from torch import nn

from ringmaster.techniques.data_source import PreparedData
from ringmaster.techniques.model_facts import CAUSAL_SUFFIXES, Decoder, LayerModule

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class PackedLinear(nn.Module):
    """A linear layer whose weights are packed, several in a byte."""

    def dequantized(self) -> nn.Linear:
        """Returns a plain layer of the values that the bits stand for."""
        raise NotImplementedError


def layer_names(model: nn.Module) -> tuple[str, ...]:
    """The names of the repeated layers, in the order of the modules, which is taken as the order of execution.

    The layers are the elements of the outermost `ModuleList`s (decoder layers, transformer blocks, the stages of a
    ResNet). In a model without a `ModuleList`, they are the children of its largest `Sequential` that have parameters.
    No layer contains another one.
    """
    lists = _outermost(model, nn.ModuleList)
    if not lists:
        sequentials = _outermost(model, nn.Sequential)
        lists = sorted(sequentials, key=lambda name: -num_parameters(model.get_submodule(name)))[:1]
    return tuple(layer for name in lists for layer in _layers(model, name))


def num_parameters(module: nn.Module) -> int:
    """Returns the number of a module's parameters; shared ones count once, packed ones by their bytes and scales."""
    scales = sum(buffer.numel() for name, buffer in module.named_buffers() if name.endswith("absmax"))
    return scales + sum(p.numel() // (1 if p.is_floating_point() else 4) for p in module.parameters())


def _layers(model: nn.Module, name: str) -> Iterator[str]:
    """The layers in the list `name`. A nested list is replaced by its elements, because it is never called itself."""
    for child, layer in model.get_submodule(name).named_children():
        path = f"{name}.{child}" if name else child
        if isinstance(layer, nn.ModuleList):
            yield from _layers(model, path)
        elif num_parameters(layer):
            yield path


def _outermost(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    result: list[str] = []
    for name, module in model.named_modules():
        inside: Iterable[str] = (outer for outer in result if not outer or name.startswith(f"{outer}."))
        if isinstance(module, kind) and num_parameters(module) and not any(inside):
            result.append(name)
    return result


def decoder_of(model: nn.Module, layers: Iterable[nn.Module], data: PreparedData) -> Decoder | None:
    """The description of `model` as a decoder, or None if it is not a causal language model that reads tokens."""
    config, name = getattr(model, "config", None), type(model).__name__
    if config is None or data.kind != "tokens" or data.seq_len is None or not name.endswith(CAUSAL_SUFFIXES):
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
