"""Attachment of an adapter to a model: adapted modules, initial values of what is trained, and frozen base weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

from ringmaster.techniques.job import Adapter
from ringmaster.techniques.models.adapter_modules import (
    LORA,
    PREFIX,
    SCALED_INPUT,
    SCALED_OUTPUT,
    PrependPrefix,
    empty_linear,
    features,
    scaling,
)
from ringmaster.techniques.models.layers import layer_names
from ringmaster.techniques.models.peft_format import ADAPTER_WEIGHTS, kv_shape, parameter_name, resolved

CAUSAL = ("ForCausalLM", "LMHeadModel")
# (targets of (IA)3, those of them whose inputs are scaled), by a config's model_type. These are peft's defaults.
_LLAMAS = (("q_proj", "v_proj", "down_proj"), ("down_proj",))
IA3_TARGETS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bert": (("key", "value", "output.dense"), ("output.dense",)),
    "gpt2": (("c_attn", "mlp.c_proj"), ("mlp.c_proj",)),
    "gpt_neox": (("query_key_value", "dense_4h_to_h"), ("dense_4h_to_h",)),
    "llama": (("k_proj", "v_proj", "down_proj"), ("down_proj",)),
    "mistral": (("k_proj", "v_proj", "down_proj"), ("down_proj",)),
    "opt": (("q_proj", "k_proj", "fc2"), ("fc2",)),
    "phi": (("q_proj", "v_proj", "fc2"), ("fc2",)),
    "roberta": (("key", "value", "output.dense"), ("output.dense",)),
    "gemma": _LLAMAS,
    "gemma2": _LLAMAS,
    "gemma3_text": _LLAMAS,
    "qwen2": _LLAMAS,
    "qwen3": _LLAMAS,
}

# Modules that map one tensor to one tensor, and compute each sample's output from that sample alone.
BY_SAMPLE = (nn.Linear, Conv1D, nn.LayerNorm, nn.Conv2d)


@dataclass(frozen=True, kw_only=True)
class AdaptedLinear:
    """A linear module that is adapted: its name, its numbers of inputs and outputs, and whether inputs are scaled."""

    name: str
    num_in: int
    num_out: int
    scales_input: bool = False


def attach(model: nn.Module, adapter: Adapter, *, seed: int) -> nn.Module:
    """Attaches the adapter to `model` in place and freezes all other weights; the initial values depend on `seed`.

    Raises ValueError where the adapter does not apply to the model, or does not match the folder that it continues
    from.
    """
    adapter = resolved(adapter)
    at = sites(model, adapter)
    state = first_state(model, adapter, at, seed=seed)
    if adapter.from_pretrained is not None:
        state = pretrained_state(Path(adapter.from_pretrained), state)
    model.requires_grad_(False)  # parameters that are filled in are trained; weights that they were tied to are not
    for site in at:
        adapt(model, site, adapter)
    if adapter.kind == "prefix":
        num_heads, head_dim = kv_shape(model.config)
        model.register_parameter(PREFIX, nn.Parameter(state[PREFIX]))
        model.register_forward_pre_hook(PrependPrefix(num_heads=num_heads, head_dim=head_dim), with_kwargs=True)
    fill(model, state)
    return model


def adapt(model: nn.Module, site: AdaptedLinear, adapter: Adapter) -> None:
    """Turns one module into an adapted one, in place; its trained parameters have no values yet."""
    module = model.get_submodule(site.name)
    plain = type(module)
    if adapter.kind == "lora":
        module.__class__ = LORA[plain]
        module.lora_A = empty_linear(site.num_in, adapter.rank)
        module.lora_B = empty_linear(adapter.rank, site.num_out)
        module.scaling = scaling(rank=adapter.rank, alpha=adapter.alpha, rank_stabilised=adapter.rank_stabilised)  # type: ignore[assignment]
    else:
        module.__class__ = (SCALED_INPUT if site.scales_input else SCALED_OUTPUT)[plain]
        shape = (1, site.num_in) if site.scales_input else (site.num_out, 1)
        module.ia3_l = nn.Parameter(torch.empty(shape, device="meta"))


def trained_names(model: nn.Module) -> frozenset[str]:
    """Returns the names of the trained parameters of a model with an adapter, which checkpoints and exports contain."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def sites(model: nn.Module, adapter: Adapter) -> list[AdaptedLinear]:
    """Returns the linear modules that the adapter targets, in the model's order.

    Modules that the adapter trains directly are left out. Raises ValueError, with a remedy, where no module remains, or
    a target matches none.
    """
    if adapter.kind == "prefix":
        _check_prefix(model)
        return []
    targets, feedforward = _targets(model, adapter)
    linear = {name: module for name, module in model.named_modules() if getattr(module, "adapts", type(module)) in LORA}
    if not linear:
        raise ValueError(
            f"adapter: {type(model).__name__} has no linear layers to put a {adapter.kind} on. "
            "To fix: leave the adapter out, which trains every weight"
        )
    for target in (*targets, *feedforward):
        if not any(_is_named(name, (target,)) for name in linear):
            raise ValueError(
                f"adapter: no linear module of {type(model).__name__} is named {target!r}. {_known(linear, target)}"
            )
    if targets:
        chosen = [name for name in linear if _is_named(name, targets)]
    else:
        layers = tuple(f"{name}." for name in layer_names(model))
        chosen = [name for name in linear if name.startswith(layers)]
        if not chosen:
            raise ValueError(
                f"adapter: {type(model).__name__} has no linear modules in repeated layers. To fix: name targets"
            )
    saved = tuple(saved_modules(model, adapter))
    chosen = [name for name in chosen if name not in saved and not name.startswith(tuple(f"{each}." for each in saved))]
    if not chosen:
        raise ValueError(
            f"adapter: all that its targets name is in its modules_to_save, {', '.join(adapter.modules_to_save)}. "
            "To fix: name other targets, or leave them out of modules_to_save"
        )
    return [
        AdaptedLinear(name=name, num_in=num_in, num_out=num_out, scales_input=_is_named(name, feedforward))
        for name in chosen
        for num_in, num_out in [features(linear[name])]
    ]


def saved_modules(model: nn.Module, adapter: Adapter) -> list[str]:
    """Returns the names of the modules that are trained directly. Raises ValueError where a name matches none."""
    names = [name for name, module in model.named_modules() if any(True for _ in module.parameters())]
    for end in adapter.modules_to_save:
        if not any(_is_named(name, (end,)) for name in names):
            raise ValueError(
                f"adapter: modules_to_save names {end!r}, and {type(model).__name__} has none of that name. "
                f"To fix: name one of its modules, such as {names[-1]}"
            )
    return [name for name in names if _is_named(name, adapter.modules_to_save)]


def own_leaves(model: nn.Module, adapter: Adapter) -> list[str]:
    """Returns names of the childless modules that hold all weights of an adapter's `modules_to_save`.

    Raises ValueError where one mixes the rows of several samples, so that its output for a sample depends on the
    others.
    """
    found = list(dict.fromkeys(name for saved in saved_modules(model, adapter) for name in _with_weights(model, saved)))
    for name in found:
        module = model.get_submodule(name)
        if not _is_by_sample(module) and module is not _input_embeddings(model):
            raise ValueError(f"adapter: {name}, which it trains as it is, is of class {type(module).__name__}")
    return found


def _is_by_sample(module: nn.Module) -> bool:
    if is_norm(type(module)):
        return [name for name, _ in module.named_parameters()] == ["weight"]
    # `nn.MultiheadAttention` reads the weights of its last layer without calling it.
    return isinstance(module, BY_SAMPLE) and not isinstance(module, NonDynamicallyQuantizableLinear)


def is_norm(kind: type[nn.Module]) -> bool:
    """Returns whether modules of a class are RMS norms as in transformers: a weight times the normalised input."""
    return kind.__name__.endswith("RMSNorm") and not issubclass(kind, nn.RMSNorm)


def _with_weights(model: nn.Module, name: str) -> Iterator[str]:
    for path, module in model.get_submodule(name).named_modules(prefix=name):
        if any(True for _ in module.parameters(recurse=False)):
            yield path


def _input_embeddings(model: nn.Module) -> nn.Module | None:
    try:
        found = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Embedding) else None


def first_state(model: nn.Module, adapter: Adapter, at: Sequence[AdaptedLinear], *, seed: int) -> dict[str, Tensor]:
    """Returns the initial values of what is trained, by name.

    They depend on the seed alone, except for modules of the model itself. As in peft, a LoRA's A is drawn uniformly
    from +-1/sqrt(in) (Kaiming's with a = sqrt 5) and its B is zero, (IA)3's factors are one, and a prefix is drawn from
    the normal distribution.
    """
    state: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for site in at:
            if adapter.kind == "lora":
                first = torch.empty(adapter.rank, site.num_in)
                state[f"{site.name}.lora_A.weight"] = nn.init.kaiming_uniform_(first, a=math.sqrt(5))
                state[f"{site.name}.lora_B.weight"] = torch.zeros(site.num_out, adapter.rank)
            else:
                state[f"{site.name}.ia3_l"] = torch.ones((1, site.num_in) if site.scales_input else (site.num_out, 1))
        if adapter.kind == "prefix":
            num_heads, head_dim = kv_shape(model.config)
            num_layers: int = model.config.num_hidden_layers  # type: ignore[union-attr,assignment]
            state[PREFIX] = torch.randn(adapter.num_virtual_tokens, num_layers * 2 * num_heads * head_dim)
    for name in saved_modules(model, adapter):
        for key, parameter in model.get_submodule(name).named_parameters():
            state[f"{name}.{key}"] = parameter.detach().clone()  # no longer tied to another module's weight
    return state


def fill(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Registers the trained tensors as parameters of their modules."""
    for name, value in state.items():
        module, _, key = name.rpartition(".")
        model.get_submodule(module).register_parameter(key, nn.Parameter(value))


def pretrained_state(folder: Path, first: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of the adapter in a folder.

    Raises ValueError where their names or shapes differ from those of `first`.
    """
    from safetensors.torch import load_file

    tensors = load_file(folder / ADAPTER_WEIGHTS).items()
    # peft may also have saved the base's copy of a head or embedding that the adapter adapts.
    found = {parameter_name(name): value.float() for name, value in tensors if ".base_layer." not in name}
    wrong = [f"{name} is missing" for name in sorted(first.keys() - found.keys())]
    wrong += [f"{name} has no place" for name in sorted(found.keys() - first.keys())]
    wrong += [
        f"{name} is {list(found[name].shape)}, not {list(first[name].shape)}"
        for name in sorted(first.keys() & found.keys())
        if found[name].shape != first[name].shape
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"adapter: the one in {folder} does not fit: {', '.join(wrong[:3])}{more}. To fix: give the model that it "
            "was trained on"
        )
    return {name: found[name] for name in first}  # gradient norms are summed in the order of `first`


def _targets(model: nn.Module, adapter: Adapter) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if adapter.kind == "lora" or adapter.targets:
        return adapter.targets, adapter.feedforward
    model_type = str(getattr(getattr(model, "config", None), "model_type", None))
    if model_type not in IA3_TARGETS:
        raise ValueError(
            f"adapter: which modules of {type(model).__name__} an (IA)3 scales is not known. To fix: name targets, and "
            "those of them whose inputs are scaled as feedforward"
        )
    return IA3_TARGETS[model_type]


def _check_prefix(model: nn.Module) -> None:
    config, name = getattr(model, "config", None), type(model).__name__
    if not name.endswith(CAUSAL) or not hasattr(config, "num_attention_heads"):
        raise ValueError(
            f"adapter: a prefix is for causal language models of transformers, and the model is a {name}. "
            "To fix: take a lora"
        )


def _is_named(name: str, ends: Sequence[str]) -> bool:
    """Returns whether a module's name is one of `ends`, or ends with one of them after a dot."""
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _known(linear: Mapping[str, nn.Module], target: str) -> str:
    ends = sorted({name.rpartition(".")[2] for name in linear})
    close = get_close_matches(target, ends, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"To fix: {hint}it has {', '.join(ends)}"


def unambiguous_targets(model: nn.Module, at: Sequence[AdaptedLinear]) -> tuple[list[str], list[str]]:
    """Returns names that match exactly the modules `at`, and those among them whose inputs are scaled."""
    names, scaled = [site.name for site in at], [site.name for site in at if site.scales_input]
    targets, feedforward = unambiguous(model, names), unambiguous(model, scaled)
    return (targets, feedforward) if set(feedforward) <= set(targets) else (sorted(names), sorted(scaled))


def unambiguous(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Returns the shortest list of suffixes that matches exactly these modules: last components, or whole names."""
    ends = sorted({name.rpartition(".")[2] for name in names})
    fitted = {name for name, _ in model.named_modules() if _is_named(name, ends)}
    return ends if fitted == set(names) else sorted(names)
