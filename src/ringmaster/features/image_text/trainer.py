"""Batches of images as models take them that have no dimension of samples in their images: Qwen2-VL and Qwen2.5-VL."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.compat.torch import unset_fake_temporarily
from ringmaster.features.image_text.layouts import GRID
from ringmaster.techniques.data.image_processors import PIXELS

TYPES, POSITIONS = "mm_token_type_ids", "position_ids"


def of_all_samples(model: nn.Module) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None:
    """Returns what makes a model's inputs of a batch with images by sample; None for models that take these."""
    config: Any = getattr(model, "config", None)
    if GRID not in inspect.signature(model.forward).parameters or not hasattr(config, "image_token_id"):
        return None

    def joined(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The patches of all images one after another, without what fills samples up: [patches, values]."""
        grids = inputs.get(GRID)
        if grids is None or grids.dim() < 3:
            return dict(inputs)
        numbers = grids.prod(-1)
        counts = numbers.sum(-1).tolist()
        pixels = torch.cat([row[:count] for row, count in zip(inputs[PIXELS], counts, strict=True)])
        grids, tokens = grids[numbers > 0], inputs["input_ids"]
        positions = positions_of(model, tokens, is_image=tokens == config.image_token_id, grids=grids)
        return {**inputs, PIXELS: pixels, GRID: grids, POSITIONS: positions, **windows_of(config, grids)}

    return joined


def positions_of(model: Any, tokens: Tensor, *, is_image: Tensor, grids: Tensor) -> Tensor:
    """Returns the positions of tokens as the model counts them, in the directions of its images: [3, rows, tokens]."""
    positions: Tensor = model.model.get_rope_index(tokens, **{TYPES: is_image.long(), GRID: grids})[0]
    return positions


def windows_of(config: Any, grids: Tensor) -> dict[str, Tensor]:
    """Returns the windows of attention of a part for images, where it cannot compute them itself: of nothing."""
    return {}


def _known_windows(config: Any, grids: Tensor) -> dict[str, Tensor]:
    """The windows of a part for images that has some, such as that of Qwen2.5-VL."""
    vision = config.vision_config
    if not hasattr(vision, "window_size"):
        return {}
    from transformers.vision_utils import get_vision_window_index

    with unset_fake_temporarily():
        places, ends = get_vision_window_index(grids, vision.spatial_merge_size, vision.window_size, vision.patch_size)
    return {"image_window_index": places, "image_cu_window_seqlens": ends}


MODEL_INPUTS = (of_all_samples,)
WITHOUT_VALUES = {
    "positions_of": lambda model, tokens, **_: torch.zeros(3, *tokens.shape, dtype=torch.int64),
    "windows_of": _known_windows,
}
"""What takes the place of functions that read values, where memory is estimated."""
