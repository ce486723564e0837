"""Small configs: a copy of a model's config with few, thin layers, so that a training step is cheap."""

import copy
from collections.abc import Iterator
from typing import Any

from ringmaster.techniques.models.architectures import LAYERS

NUM_LAYERS = 2
HEAD_WIDTH = 8
MOST_EXPERTS = 8

# The different names of equal fields in configs of transformers.
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "projection_dim", "embedding_size")
HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
HEAD_WIDTHS = ("head_dim", "d_kv", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_channels")
INNER = (
    *("intermediate_size", "d_ff", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "mlp_dim"),
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k")
GROUPED_EXPERTS = ("n_group", "num_expert_group")


def tiny_config(config: Any, *, thin: bool = True) -> Any:
    """A copy of a Hugging Face config with two layers, or more if it lists more kinds of layers: one of each kind.

    thin: also shrinks heads to eight features, and reduces the number of experts. A width that is no multiple of the
        number of heads stays so, because the faults of the config must remain.
    """
    tiny = copy.deepcopy(config)
    for part in _parts(tiny):
        _shorten(part)
        if thin:
            _thin(part)
    return tiny


def _parts(config: Any) -> Iterator[Any]:
    """Yields the config and its nested configs, such as a vision tower's."""
    from transformers import PreTrainedConfig

    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _shorten(config: Any) -> None:
    lengths = {name: value for name in LAYERS if isinstance(value := vars(config).get(name), int)}
    longest = max(lengths.values(), default=0)
    lists = {name: v for name, v in vars(config).items() if isinstance(v, list | tuple) and len(v) == longest > 1}
    kept = _kinds(longest, [value for value in lists.values() if all(isinstance(kind, str) for kind in value)])
    for name, value in lengths.items():
        setattr(config, name, len(kept) if value == longest and value > len(kept) else min(value, NUM_LAYERS))
    if longest > len(kept) and "depths" not in lists:
        for name, value in lists.items():
            setattr(config, name, type(value)(value[i] for i in kept))
    if isinstance(depths := vars(config).get("depths"), list | tuple):
        config.depths = type(depths)(1 for _ in depths)
    if isinstance(first := vars(config).get("first_k_dense_replace"), int):
        config.first_k_dense_replace = min(first, 1)


def _kinds(num_layers: int, lists: list[Any]) -> list[int]:
    """The indices of the first layer of each kind, at least two layers."""
    seen: dict[tuple[str, ...], int] = {}
    for i in range(num_layers):
        seen.setdefault(tuple(kinds[i] for kinds in lists), i)
    chosen = set(seen.values())
    return sorted([*chosen, *(i for i in range(num_layers) if i not in chosen)][: max(NUM_LAYERS, len(chosen))])


def _thin(config: Any) -> None:
    result = vars(config)
    heads = [value for name in HEADS if isinstance(value := result.get(name), int)]
    widths = [value for name in WIDTHS if isinstance(value := result.get(name), int)]
    if not heads or not widths or any(isinstance(result.get(name), list | tuple) for name in (*HEADS, *WIDTHS)):
        return
    thinnest = HEAD_WIDTH * max(heads)
    for name in WIDTHS:
        if isinstance(width := result.get(name), int):
            setattr(config, name, min(width, thinnest + width % max(heads)))
    limits = [(HEAD_WIDTHS, HEAD_WIDTH), (INNER, 2 * thinnest)]
    if not any(result.get(name) for name in GROUPED_EXPERTS):
        chosen = max([value for name in CHOSEN_EXPERTS if isinstance(value := result.get(name), int)], default=1)
        limits.append((EXPERTS, max(MOST_EXPERTS, 2 * chosen)))
    for names, most in limits:
        for name in names:
            if isinstance(value := result.get(name), int):
                setattr(config, name, min(value, most))
