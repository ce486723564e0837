"""Perturbations of texts and images for behavioural tests, deterministic by seed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ringmaster.tasks.evaluation.suite import ChangeEntry

Images = npt.NDArray[np.float32]


def changed_text(text: str, change: ChangeEntry, *, seed: int) -> str:
    """Returns a text after a change. seed: with the text, the seed of random typos."""
    if change.typo is not None:
        text = _with_typos(text, change.typo, random.Random(f"{seed} {text}"))
    if change.case is not None:
        text = {"upper": text.upper(), "lower": text.lower(), "title": text.title()}[change.case]
    for word, other in (change.replace or {}).items():
        text = other.join(re.split(rf"(?<!\w){re.escape(word)}(?!\w)", text))
    return f"{change.prepend or ''}{text}{change.append or ''}"


def changed_images(images: Images, change: ChangeEntry, *, seed: int) -> Images:
    """Returns images [rows, channels, height, width] after a change; uncovered areas get the smallest pixel value."""
    found = images.astype(np.float32)
    for key in IMAGE_CHANGES:
        value = getattr(change, key)
        if value is not None:
            found = IMAGE_CHANGES[key](found, value, np.random.default_rng(seed))
    return np.ascontiguousarray(found)


def _with_typos(text: str, number: int, draw: random.Random) -> str:
    """Swaps neighbouring letters in `number` places, or in as many as there are."""
    letters = list(text)
    places = [
        i for i in range(len(letters) - 1)
        if letters[i].isalpha() and letters[i + 1].isalpha() and letters[i] != letters[i + 1]
    ]  # fmt: skip
    for _ in range(number):
        if not places:
            break
        place = draw.choice(places)
        letters[place], letters[place + 1] = letters[place + 1], letters[place]
        places = [i for i in places if abs(i - place) > 1]
    return "".join(letters)


def _shifted(images: Images, by: list[int], _: np.random.Generator) -> Images:
    right, down = by
    height, width = images.shape[-2:]
    found = np.full_like(images, images.min())
    into_y, from_y = slice(max(down, 0), height + min(down, 0)), slice(max(-down, 0), height + min(-down, 0))
    into_x, from_x = slice(max(right, 0), width + min(right, 0)), slice(max(-right, 0), width + min(-right, 0))
    if abs(right) < width and abs(down) < height:
        found[..., into_y, into_x] = images[..., from_y, from_x]
    return found


def _rotated(images: Images, degrees: int, _: np.random.Generator) -> Images:
    if degrees != 180 and images.shape[-1] != images.shape[-2]:
        raise ValueError(f"images of {images.shape[-1]}x{images.shape[-2]} turned by {degrees} are of another shape")
    return np.rot90(images, k=degrees // 90, axes=(-2, -1))


def _flipped(images: Images, how: str, _: np.random.Generator) -> Images:
    return np.flip(images, axis=-1 if how == "horizontal" else -2)


def _noisy(images: Images, deviation: float, draw: np.random.Generator) -> Images:
    return images + draw.normal(0, deviation, images.shape).astype(np.float32)


def _brighter(images: Images, by: float, _: np.random.Generator) -> Images:
    brighter: Images = np.clip(images + np.float32(by), images.min(), images.max())
    return brighter


def _occluded(images: Images, side: int, draw: np.random.Generator) -> Images:
    found = images.copy()
    height, width = images.shape[-2:]
    side = min(side, height, width)
    for image in found:
        y, x = draw.integers(0, height - side + 1), draw.integers(0, width - side + 1)
        image[..., y : y + side, x : x + side] = images.min()
    return found


IMAGE_CHANGES: Mapping[str, Callable[[Images, Any, np.random.Generator], Images]] = {
    "shift": _shifted,
    "rotate": _rotated,
    "flip": _flipped,
    "noise": _noisy,
    "brightness": _brighter,
    "occlude": _occluded,
}
