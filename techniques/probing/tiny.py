"""What makes a probe's training step cheap: small configs and small batches.

A config is a copy of the model's with few, thin layers. The samples of a batch are cropped to few tokens, made up from
shapes, or have uneven numbers of labels.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ringmaster.techniques.data_source import PreparedData, SampleTensor
from ringmaster.techniques.metric import IGNORED
from ringmaster.techniques.model_facts import text_config_of
from ringmaster.techniques.models.architectures import LAYERS, PIXELS

NUM_LAYERS = 2
HEAD_WIDTH = 8
CONVOLUTION_WIDTH = 32
MAX_EXPERTS = 8
LONGEST = 32  # tokens
BEFORE = 4  # of them, before the first position that has a label, or at which the sequences of a pair differ

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

    thin: also shrinks heads to eight features, and reduces the number of experts. A width that is not a multiple of the
        number of heads stays so, because the faults of the config must remain.
    """
    tiny = copy.deepcopy(config)
    for part in _parts(tiny):
        _shorten(part)
        if thin:
            _thin(part)
    _fit_images(tiny)
    return tiny


def _parts(config: Any) -> Iterator[Any]:
    """Yields the config and its nested configs, such as a vision tower's."""
    from transformers import PreTrainedConfig

    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _fit_images(config: Any) -> None:
    """Makes a part for images write embeddings of the text's width, and rotates as many features as a head has."""
    text, vision = text_config_of(config), getattr(config, "vision_config", None)
    written = next((name for name in ("out_hidden_size", "hidden_size") if hasattr(vision, name)), "")
    if written == "out_hidden_size" or hasattr(vision, "embed_dim"):
        setattr(vision, written, text.hidden_size)
    rotation = getattr(text, "rope_parameters", None)
    if isinstance(rotation, Mapping) and (sections := rotation.get("mrope_section")):
        half = (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads) // 2
        cut = [part * half // sum(sections) for part in sections]
        text.rope_parameters = {**rotation, "mrope_section": [*cut[:-1], half - sum(cut[:-1])]}


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
    if isinstance(widths := result.get("conv_dim"), (list, tuple)):  # of convolutions over the samples of recordings
        config.conv_dim = type(widths)(min(each, CONVOLUTION_WIDTH) for each in widths)
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
        limits.append((EXPERTS, max(MAX_EXPERTS, 2 * chosen)))
    for names, most in limits:
        for name in names:
            if isinstance(value := result.get(name), int):
                setattr(config, name, min(value, most))


def cropped(batch: Mapping[str, Tensor], *, seq_len: int | None) -> dict[str, Tensor]:
    """Crops tensors of `seq_len` tokens a sample to `LONGEST` tokens; other tensors stay unchanged.

    The tokens are those behind padding on the left, where a sample's labels begin, and where the sequences of a pair
    begin to differ: of a common prompt alone the gradients of a comparison cancel, and what is left is rounding.
    """
    if seq_len is None or seq_len <= LONGEST or PIXELS in batch:  # which belong to tokens anywhere in a row
        return dict(batch)
    first = torch.zeros(len(next(iter(batch.values()))), dtype=torch.long)
    tokens, labels, mask = batch.get("input_ids"), batch.get("labels"), batch.get("attention_mask")
    if mask is not None and mask.shape[-1] == seq_len:
        first = _first(mask != 0)
    if labels is not None and labels.dim() > 1 and labels.shape[-1] == seq_len and not labels.is_floating_point():
        first = _first(labels != IGNORED)
    if tokens is not None and tokens.dim() == 3:
        first = first.maximum(_first(tokens[:, 1:] != tokens[:, :1]))
    window = (first - BEFORE).clamp(0, seq_len - LONGEST).unsqueeze(1) + torch.arange(LONGEST)
    return {name: _cropped(value, seq_len, window) for name, value in batch.items()}


def _first(is_there: Tensor) -> Tensor:
    """The first position of each sample at which one of its sequences has something: [rows]; 0 where none has."""
    return is_there.reshape(len(is_there), -1, is_there.shape[-1]).any(1).int().argmax(-1)


def _cropped(value: Tensor, seq_len: int, window: Tensor) -> Tensor:
    rows = torch.arange(len(value)).unsqueeze(1)
    if value.dim() > 1 and value.shape[1] == seq_len:
        return value[rows, window]
    is_pair = value.dim() == 3 and value.shape[2] == seq_len  # of sequences
    return value.transpose(1, 2)[rows, window].transpose(1, 2).contiguous() if is_pair else value


def made_up(data: PreparedData, number: int) -> dict[str, Tensor] | None:
    """Random samples of the shapes that `data` describes, for data that is not available; None if it lacks shapes."""
    draw = torch.Generator().manual_seed(0)
    if data.tensors:
        made = {tensor.name: _made_up_tensor(tensor, data, number, draw) for tensor in data.tensors}
        return with_image_tokens(made, data)
    if data.kind == "tokens" and data.vocab_size and data.seq_len:
        tokens = torch.randint(data.vocab_size, (number, min(data.seq_len, LONGEST)), generator=draw)
        return {"input_ids": tokens, "labels": tokens}
    if data.kind == "images" and data.image_size and data.num_channels:
        shape = (number, data.num_channels, data.image_size, data.image_size)
        labels = torch.randint(data.num_labels or 2, (number,), generator=draw)
        return {"pixel_values": torch.randn(shape, generator=draw), "labels": labels}
    return None


def _made_up_tensor(tensor: SampleTensor, data: PreparedData, number: int, draw: torch.Generator) -> torch.Tensor:
    shape, dtype = (number, *tensor.shape), getattr(torch, tensor.dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=draw, dtype=dtype)
    if tensor.name == "input_ids":
        return torch.randint(data.vocab_size or 2, shape, generator=draw)
    if tensor.name == "labels":
        return torch.randint(data.num_labels or data.vocab_size or 2, shape, generator=draw)
    return torch.ones(shape, dtype=dtype)  # such as a mask


def with_image_tokens(samples: dict[str, Tensor], data: PreparedData) -> dict[str, Tensor]:
    """Returns made-up samples with as many tokens of images as their images have; others as they are."""
    if not data.images:
        return samples
    tokens, token, place = samples["input_ids"].clone(), data.images["token"], 0
    tokens[tokens == token] = int(token == 0)
    for count in data.images["counts"]:
        tokens[..., place : place + count] = token
        place += count + 1
    arrays = {name: torch.tensor(values) for name, values in data.images["arrays"].items()}
    rows = tokens.shape[:-1]
    arrays = {name: values.expand(*rows, *values.shape).clone() for name, values in arrays.items()}
    return {**samples, **arrays, "input_ids": tokens}


def ragged(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch with fewer labels in each sample than in the one before, and sequences of pairs that are not the same.

    Equal numbers of labels would hide a loss that averages per sample. The gradients of equal sequences cancel.
    """
    batch = dict(batch)
    tokens, labels = batch.get("input_ids"), batch.get("labels")
    if tokens is not None and tokens.dim() == 3 and tokens.shape[1] > 1:
        is_same = (tokens[:, 1] == tokens[:, 0]).all(-1)
        batch["input_ids"] = tokens.clone()
        batch["input_ids"][is_same, 1] = tokens[is_same, 1].roll(1, dims=-1)
    if labels is None or labels.dim() < 2 or labels.is_floating_point() or labels.shape[-1] < len(labels) + 1:
        return batch
    counted = labels != IGNORED
    num_labels = counted.sum(-1, keepdim=True)  # [rows, ..., 1]
    place = torch.arange(len(labels)).reshape(-1, *[1] * (labels.dim() - 1))
    kept = (num_labels - place * (num_labels // (len(labels) + 1)).clamp(min=1)).clamp(min=2)
    batch["labels"] = labels.masked_fill(counted.cumsum(-1) > kept, IGNORED)
    return batch


def rows_of(batch: Mapping[str, Tensor], rows: Sequence[int]) -> dict[str, Tensor]:
    """The samples of a batch at the indices `rows`."""
    chosen = torch.as_tensor(rows)
    return {name: value[chosen] for name, value in batch.items()}
