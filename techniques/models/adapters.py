"""Attachment of an adapter to a model: adapted modules, initial values of what is trained, and frozen base weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

from ringmaster.techniques.job_specs import VIRTUAL_TOKENS, Adapter
from ringmaster.techniques.models import adapter_modules
from ringmaster.techniques.models.layers import PackedLinear, layer_names
from ringmaster.techniques.models.model_folders import few, misfits
from ringmaster.techniques.models.peft_format import ADAPTER_WEIGHTS, PREFIX, kv_shape, parameter_name, resolved

CAUSAL = ("ForCausalLM", "LMHeadModel")
# Modules that map one tensor to one tensor, and compute each sample's output from that sample alone.
BY_SAMPLE = (nn.Linear, Conv1D, nn.LayerNorm, nn.Conv2d)


@dataclass(frozen=True, kw_only=True)
class AdaptedLinear:
    """A linear module that is adapted: its name, its numbers of inputs and outputs, and whether inputs are scaled."""

    name: str
    num_in: int
    num_out: int
    scales_input: bool = False

    @property
    def shape_of_factors(self) -> tuple[int, int]:
        """The shape of (IA)3's factors."""
        return (1, self.num_in) if self.scales_input else (self.num_out, 1)


def attach(model: nn.Module, adapter: Adapter, *, seed: int) -> nn.Module:
    """Attaches the adapter to `model` in place and freezes all other weights; the initial values depend on `seed`.

    Raises ValueError where the adapter does not apply to the model, or does not match the folder that it continues
    from.
    """
    adapter = resolved(adapter)
    at = sites(model, adapter)
    state = first_state(model, adapter, at, seed=seed)
    model.requires_grad_(False)  # parameters that are filled in are trained; weights that they were tied to are not
    for site in at:
        adapt(model, site, adapter)
    if adapter.kind in VIRTUAL_TOKENS:
        num_heads, head_dim = kv_shape(model.config)
        model.register_parameter(PREFIX, nn.Parameter(state[PREFIX]))
        hook = (
            adapter_modules.PrependPrompt()
            if adapter.kind == "prompt"
            else adapter_modules.PrependPrefix(num_heads=num_heads, head_dim=head_dim)
        )
        model.register_forward_pre_hook(hook, with_kwargs=True)
        if isinstance(hook, adapter_modules.PrependPrompt):
            model.register_forward_hook(hook.cut)
    for name, value in state.items():
        path, _, key = name.rpartition(".")
        model.get_submodule(path).register_parameter(key, nn.Parameter(value))
    return model


def adapt(model: nn.Module, site: AdaptedLinear, adapter: Adapter) -> None:
    """Turns one module into an adapted one, in place; its trained parameters have no values yet."""
    module: Any = model.get_submodule(site.name)
    if adapter.kind != "lora":
        module.__class__ = adapter_modules.adapted_class(adapter_modules.ScaledLayer, type(module))  # type: ignore[arg-type]
        module.scales_input = site.scales_input
        module.ia3_l = nn.Parameter(torch.empty(site.shape_of_factors, device="meta"))
        return
    module.__class__ = adapter_modules.adapted_class(adapter_modules.LoraLayer, type(module))  # type: ignore[arg-type]
    module.lora_A = nn.Linear(site.num_in, adapter.rank, bias=False, device="meta")
    module.lora_B = nn.Linear(adapter.rank, site.num_out, bias=False, device="meta")
    module.lora_dropout = nn.Dropout(adapter.dropout) if adapter.dropout else None
    module.lora_magnitude_vector = None
    module.scaling = adapter.scaling
    if adapter.dora:
        from peft.tuners.lora.dora import DoraLinearLayer

        module.lora_magnitude_vector = DoraLinearLayer(fan_in_fan_out=isinstance(module, Conv1D))  # type: ignore[no-untyped-call]


def trained_names(model: nn.Module) -> frozenset[str]:
    """Returns the names of the trained parameters of a model with an adapter, which checkpoints and exports contain."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def sites(model: nn.Module, adapter: Adapter) -> list[AdaptedLinear]:
    """Returns the linear modules that the adapter targets, in the model's order.

    Modules that the adapter trains directly are left out. Raises ValueError, with a remedy, where no module remains, or
    a target matches none.
    """
    if adapter.kind in VIRTUAL_TOKENS:
        _check_virtual_tokens(model, adapter.kind)
        return []
    targets, feedforward = _targets(model, adapter)
    linear = {name: module for name, module in model.named_modules() if adapter_modules.is_adaptable(module)}
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
        for num_in, num_out in [adapter_modules.features(linear[name])]
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
    result = dict.fromkeys(
        name
        for saved in saved_modules(model, adapter)
        for name, module in model.get_submodule(saved).named_modules(prefix=saved)
        if any(True for _ in module.parameters(recurse=False))
    )
    for name in result:
        module = model.get_submodule(name)
        if not _is_by_sample(module) and module is not _input_embeddings(model):
            raise ValueError(f"adapter: {name}, which it trains as it is, is of class {type(module).__name__}")
    return list(result)


def _is_by_sample(module: nn.Module) -> bool:
    if is_norm(type(module)):
        return [name for name, _ in module.named_parameters()] == ["weight"]
    # `nn.MultiheadAttention` reads the weights of its last layer without calling it.
    return isinstance(module, BY_SAMPLE) and not isinstance(module, NonDynamicallyQuantizableLinear)


def is_norm(kind: type[nn.Module]) -> bool:
    """Returns whether modules of a class are RMS norms as in transformers: a weight times the normalised input."""
    return kind.__name__.endswith("RMSNorm") and not issubclass(kind, nn.RMSNorm)


def _input_embeddings(model: nn.Module) -> nn.Module | None:
    try:
        result = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    return result if isinstance(result, nn.Embedding) else None


def first_state(model: nn.Module, adapter: Adapter, at: Sequence[AdaptedLinear], *, seed: int) -> dict[str, Tensor]:
    """Returns the initial values of what is trained, by name; PiSSA and OLoRA change the base's weights.

    They are those of the folder that the adapter continues from, if there is one (`pretrained_state`). Else they depend
    on the seed alone, except for modules of the model itself. As in peft, a LoRA's A is drawn uniformly from
    +-1/sqrt(in) (Kaiming's with a = sqrt 5) and its B is zero, (IA)3's factors are one, and a prefix is drawn from the
    normal distribution.
    """
    state: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for site in at:
            module: Any = model.get_submodule(site.name)
            if adapter.kind == "lora" and (adapter.dora or adapter.subtracts):
                state |= {f"{site.name}.{name}": value for name, value in _by_peft(module, adapter).items()}
            elif adapter.kind == "lora":
                first = torch.empty(adapter.rank, site.num_in)
                state[f"{site.name}.lora_A.weight"] = nn.init.kaiming_uniform_(first, a=math.sqrt(5))
                state[f"{site.name}.lora_B.weight"] = torch.zeros(site.num_out, adapter.rank)
            else:
                state[f"{site.name}.ia3_l"] = torch.ones(site.shape_of_factors)
        if adapter.kind in VIRTUAL_TOKENS:
            config: Any = model.config
            num_heads, head_dim = kv_shape(config)
            of_prefix = config.num_hidden_layers * 2 * num_heads * head_dim
            width = of_prefix if adapter.kind == "prefix" else config.hidden_size
            state[PREFIX] = torch.randn(adapter.num_virtual_tokens, width)
    for name in saved_modules(model, adapter):
        for key, parameter in model.get_submodule(name).named_parameters():
            state[f"{name}.{key}"] = parameter.detach().clone()  # no longer tied to another module's weight
    return state if adapter.from_pretrained is None else pretrained_state(Path(adapter.from_pretrained), state)


def _by_peft(module: Any, adapter: Adapter) -> dict[str, Tensor]:
    """Returns the initial values of a LoRA by peft, which subtracts its product from the weight where it is to."""
    from peft import LoraConfig
    from peft.tuners.lora.layer import Linear

    initial: Any = adapter.initialization if adapter.subtracts and not module.weight.is_meta else True
    is_transposed = isinstance(module, Conv1D)
    config = LoraConfig(
        r=adapter.rank, lora_alpha=adapter.alpha, use_rslora=adapter.rank_stabilised, use_dora=adapter.dora,  # type: ignore[arg-type]
        init_lora_weights=initial, fan_in_fan_out=is_transposed,
    )  # fmt: skip
    plain = module.dequantized() if isinstance(module, PackedLinear) else module
    layer = Linear(plain, "one", config=config, r=adapter.rank, lora_alpha=adapter.alpha)  # type: ignore[arg-type]
    names = ("lora_A", "lora_B", *(("lora_magnitude_vector",) if adapter.dora else ()))
    return {f"{name}.weight": getattr(layer, name)["one"].weight.detach().clone() for name in names}


def without_subtraction(
    adapter: Adapter, state: Mapping[str, Tensor], first: Mapping[str, Tensor]
) -> tuple[Adapter, dict[str, Tensor]]:
    """Returns an adapter of the base as it was, where the product of `first` was subtracted from it.

    s B A - s B_0 A_0 is a product of twice the rank, whose last halves are -B_0 and A_0.
    """
    if not first:
        return adapter, dict(state)
    doubled = {
        name: torch.cat([value, -first[name] if ".lora_B." in name else first[name]], dim=int(".lora_B." in name))
        for name, value in state.items()
        if ".lora_" in name
    }
    return adapter.exported, {**state, **doubled}


def pretrained_state(folder: Path, first: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of the adapter in a folder.

    Raises ValueError where their names or shapes differ from those of `first`.
    """
    from safetensors.torch import load_file

    tensors = load_file(folder / ADAPTER_WEIGHTS).items()
    # peft may also have saved the base's copy of a head or embedding that the adapter adapts.
    result = {parameter_name(name): value.float() for name, value in tensors if ".base_layer." not in name}
    shapes, wanted = ({name: value.shape for name, value in each.items()} for each in (result, first))
    if wrong := misfits(shapes, wanted):
        raise ValueError(
            f"adapter: the one in {folder} does not fit: {few(wrong)}. To fix: give the model that it was trained on"
        )
    return {name: result[name] for name in first}  # gradient norms are summed in the order of `first`


def _targets(model: nn.Module, adapter: Adapter) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if adapter.kind == "lora" or adapter.targets:
        return adapter.targets, adapter.feedforward
    from peft.utils import constants

    model_type = str(getattr(getattr(model, "config", None), "model_type", None))
    chosen = constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING.get(model_type)
    if chosen is None:
        raise ValueError(
            f"adapter: which modules of {type(model).__name__} an (IA)3 scales is not known. To fix: name targets, and "
            "those of them whose inputs are scaled as feedforward"
        )
    return tuple(chosen), tuple(constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING[model_type])


def _check_virtual_tokens(model: nn.Module, kind: str) -> None:
    config, name = getattr(model, "config", None), type(model).__name__
    if not name.endswith(CAUSAL) or not hasattr(config, "num_attention_heads"):
        raise ValueError(
            f"adapter: a {kind} is for causal language models of transformers, and the model is a {name}. "
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
