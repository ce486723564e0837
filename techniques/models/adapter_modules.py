"""Modules with adapters: linear layers with low-rank summands or factors, and models with a prefix or a prompt.

An adapted module keeps its name, its weights and their names, and gets further parameters: `q_proj.weight` stays, and
`q_proj.lora_A.weight` and `q_proj.lora_B.weight` are added. So the files of a base still match, and techniques that
find modules by name, divide them or move them still do; peft's own layers wrap a module and rename it. The arithmetic
is peft's, in its order.

Sources: Hu et al., LoRA (arXiv:2106.09685), section 4.1; Kalajdzievski, rsLoRA (arXiv:2312.03732); Liu et al., (IA)3
(arXiv:2205.05638), section 3.3; Li and Liang, Prefix-Tuning (arXiv:2101.00190), section 4.
"""

from collections import Counter
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.pytorch_utils import Conv1D

from ringmaster.compat.torch import forward_pre_hooks, own_modules, own_parameters
from ringmaster.techniques.models.layers import PackedLinear
from ringmaster.techniques.models.peft_format import PREFIX


class AdaptedLayer(nn.Module):
    """A linear layer with an adapter. Its class is made of the adapter's class and of the layer's own."""

    plain: type[nn.Module]
    is_off = False


class LoraLayer(AdaptedLayer):
    """y = W x + b + s B A d(x), with A [rank, in], B [out, rank] and the dropout d; computed in this order.

    A DoRA (Liu et al., arXiv:2402.09353) scales the rows of W + s B A to the trained lengths of
    `lora_magnitude_vector`, which is peft's layer.
    """

    lora_A: nn.Linear
    lora_B: nn.Linear
    lora_dropout: nn.Dropout | None
    lora_magnitude_vector: nn.Module | None
    scaling: float

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., in] to [..., out]."""
        base: Tensor = super().forward(x)
        if self.is_off:
            return base
        drops = self.lora_dropout is not None and self.training
        if self.lora_dropout is not None:
            x = self.lora_dropout(x)
        if self.lora_magnitude_vector is not None:
            added: Tensor = self.lora_magnitude_vector(
                x, lora_A=self.lora_A, lora_B=self.lora_B, scaling=self.scaling, base_layer=self,
                base_result=None if drops else base,
            )  # fmt: skip
            return base + added
        product: Tensor = self.lora_B(self.lora_A(x)) * self.scaling
        return base + product


class ScaledLayer(AdaptedLayer):
    """y = l * (W x + b), with l [out, 1]; or y = W (l * x) + b, with l [1, in]."""

    ia3_l: nn.Parameter
    scales_input: bool

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., in] to [..., out]."""
        base: Tensor = super().forward(x * self.ia3_l.flatten() if self.scales_input and not self.is_off else x)
        return base if self.scales_input or self.is_off else base * self.ia3_l.flatten()


@cache
def adapted_class(adapter: type[AdaptedLayer], plain: type[nn.Module]) -> type[nn.Module]:
    """Returns the class of the layers of class `plain` with an adapter."""
    return type(f"{adapter.__name__}Of{plain.__name__}", (adapter, plain), {"plain": plain})


def is_adaptable(module: nn.Module) -> bool:
    """Returns whether a module is a linear one of a class that can be adapted."""
    kind = getattr(module, "adapts", type(module))
    return kind in (nn.Linear, Conv1D) or issubclass(kind, PackedLinear)


def features(module: nn.Module) -> tuple[int, int]:
    """Returns (in, out) of a linear module of a class that can be adapted."""
    if isinstance(module, Conv1D):
        return tuple(module.weight.shape)
    return module.in_features, module.out_features  # type: ignore[return-value]


class PrefixLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's learned keys and values, [rows, heads, virtual tokens, dim], before those of the tokens.

    The layer stores nothing of the tokens, so that a forward may be repeated, as recomputation does.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the prefix, followed by those given."""
        keys = torch.cat([self.keys.to(key_states.dtype), key_states], dim=-2)
        return keys, torch.cat([self.values.to(value_states.dtype), value_states], dim=-2)


def prefix_cache(embeddings: Tensor, *, num_rows: int, num_heads: int, head_dim: int) -> DynamicCache:
    """Returns every layer's prefix for `num_rows` sequences.

    `embeddings` is [virtual tokens, layers * 2 * heads * head_dim].
    """
    num_tokens = embeddings.shape[0]
    parts = embeddings.view(num_tokens, -1, 2, num_heads, head_dim).permute(1, 2, 3, 0, 4)
    cache = DynamicCache()
    cache.layers = [PrefixLayer(*(x.expand(num_rows, *x.shape) for x in layer)) for layer in parts]
    return cache


class PrependPrefix:
    """Forward pre-hook of a causal language model that passes its prefix as the keys and values of earlier tokens."""

    def __init__(self, *, num_heads: int, head_dim: int) -> None:
        self._num_heads, self._head_dim = num_heads, head_dim
        self.is_off = False

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Adds the prefix, and an attention mask that covers it, to the keyword arguments."""
        if self.is_off:
            return args, kwargs
        embeddings = own_parameters(model)[PREFIX]
        assert embeddings is not None
        tokens = args[0] if args else kwargs["input_ids"]
        cache = prefix_cache(embeddings, num_rows=len(tokens), num_heads=self._num_heads, head_dim=self._head_dim)
        added: dict[str, Any] = {"past_key_values": cache, "use_cache": False}
        if (mask := kwargs.get("attention_mask")) is not None:
            seen = mask.new_ones(len(tokens), embeddings.shape[0])
            added["attention_mask"] = torch.cat([seen, mask], dim=1)
        return args, {**kwargs, **added}


class PrependPrompt(PrependPrefix):
    """Forward pre-hook of a causal language model that puts its prompt before the tokens, as embeddings."""

    def __init__(self) -> None:
        super().__init__(num_heads=0, head_dim=0)

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replaces the tokens by embeddings with those of the prompt before them; masks and positions cover both."""
        if self.is_off:
            return args, kwargs
        prompt = own_parameters(model)[PREFIX]
        assert prompt is not None
        given = dict(kwargs)
        tokens = args[0] if args else given.pop("input_ids")
        embeddings = model.get_input_embeddings()(tokens)
        before = prompt.to(embeddings.dtype).expand(len(tokens), *prompt.shape)
        given["inputs_embeds"] = torch.cat([before, embeddings], dim=1)
        if (mask := given.get("attention_mask")) is not None:
            given["attention_mask"] = torch.cat([mask.new_ones(len(tokens), len(prompt)), mask], dim=1)
        if (positions := given.get("position_ids")) is not None:
            first = torch.arange(len(prompt), device=positions.device).expand(len(positions), -1)
            given["position_ids"] = torch.cat([first, positions + len(prompt)], dim=1)
        return (), given

    def cut(self, model: Any, args: Any, output: Any) -> Any:
        """Forward hook: removes the logits of the prompt."""
        if not self.is_off:
            prompt = own_parameters(model)[PREFIX]
            assert prompt is not None
            output.logits = output.logits[:, len(prompt) :]
        return output


def switchable(model: nn.Module) -> list[Any]:
    """Returns the parts of an adapter that can be switched off by their attribute `is_off`.

    Without them, the model computes as it did before the adapter was attached.
    """
    modules = list(model.modules())
    hooks = [hook for module in modules for hook in forward_pre_hooks(module)]
    return [part for part in [*modules, *hooks] if isinstance(part, (AdaptedLayer, PrependPrefix))]


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Merges the adapters of linear modules into their weights, in place: W <- W + s B A, or l W, or W l.

    A packed layer becomes a plain one, of the values that its bits stand for: those that the adapter was trained on.
    An adapted head that shares the embedding's weight gets one of its own, which leaves the embedding as it is.
    Raises ValueError for a prefix or a prompt, which weights cannot hold, and where another module shares a weight.
    """
    if PREFIX in own_parameters(model):
        raise ValueError("adapter: a prefix cannot be merged into weights. To fix: take what it is on as base")
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, AdaptedLayer) and head.weight is model.get_input_embeddings().weight:  # type: ignore[operator]
        head.weight = nn.Parameter(head.weight.detach().clone())
    _check_untied(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear):
            model.set_submodule(name, module.dequantized())
        if not isinstance(module, AdaptedLayer):
            continue
        plain: Any = model.get_submodule(name)
        weight = plain.weight if isinstance(plain, nn.Linear) else plain.weight.T
        assert isinstance(weight, Tensor)
        if isinstance(module, LoraLayer):
            weight += module.lora_B.weight @ module.lora_A.weight * module.scaling
            if module.lora_magnitude_vector is not None:
                lengths: Any = module.lora_magnitude_vector.weight
                weight *= (lengths / torch.linalg.norm(weight, dim=1)).unsqueeze(1)
        elif isinstance(module, ScaledLayer):
            weight *= module.ia3_l
            if plain.bias is not None and not module.scales_input:
                plain.bias *= module.ia3_l.flatten()
        if plain is module:
            for key in ("lora_A", "lora_B", "lora_dropout", "lora_magnitude_vector", "ia3_l"):
                if key in own_modules(module) or key in own_parameters(module):
                    delattr(module, key)
            module.__class__ = module.plain
    _note_own_head(model)
    return model.requires_grad_(True)


def _note_own_head(model: nn.Module) -> None:
    """Marks a head with a weight of its own as untied, so that loading the model does not tie it again."""
    config, heads = getattr(model, "config", None), getattr(model, "get_output_embeddings", lambda: None)
    head = heads()
    if head is not None and getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = head.weight is model.get_input_embeddings().weight  # type: ignore[operator,union-attr]


def _check_untied(model: nn.Module) -> None:
    """Raises ValueError where another module shares an adapted weight, as merging would change that module too."""
    holders = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLayer) and any(holders[id(p)] > 1 for p in module.parameters(recurse=False)):
            raise ValueError(
                f"adapter: {name}, which it adapts, shares its weight with another module, and merged into one it "
                "would change both. To fix: take what it is on as base, or adapt other targets"
            )
