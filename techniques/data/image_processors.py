"""Image processors of models, as transformers has them: what turns an image into the inputs of a model."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmaster.extras import require_extra
from ringmaster.techniques.data.arrow_files import Array
from ringmaster.techniques.models.model_folders import read_json

if TYPE_CHECKING:
    from PIL.Image import Image

PROCESSOR, COMBINED_PROCESSOR = "preprocessor_config.json", "processor_config.json"
"""The files that describe an image processor. The second one is of processors for texts, too."""
PIXELS = "pixel_values"
MAX_IMAGE_SIZE = 4096
REMEDY = (
    f"To fix: give a folder with a {PROCESSOR} that transformers' AutoImageProcessor loads, or a hub name; or give "
    "image_size, mean and std"
)
SIZES_TRIED = ((9, 7), (300, 200))
"""Widths and heights of the images on which it is tried how pixels can be stored."""


def has_processor(name: str) -> bool:
    """Returns whether a model has an image processor of its own; taken for granted on the hub."""
    folder = Path(name)
    is_there = (folder / PROCESSOR).is_file() or "image_processor" in read_json(folder / COMBINED_PROCESSOR)
    return is_there or not folder.is_dir()


def processor_files(name: str) -> dict[str, bytes]:
    """Returns the files of the image processor in a folder, or of a model on the hub.

    Raises ValueError where there are none.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    result, faults = dict[str, bytes](), dict[str, str]()
    for file in (PROCESSOR, COMBINED_PROCESSOR):
        try:
            path = Path(name) / file if Path(name).is_dir() else Path(hf_hub_download(name, file))
            result[file] = path.read_bytes()
        except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
            faults[file] = " ".join(str(error).split())
    if not result:
        raise ValueError(f"processor {name!r} cannot be read: {faults[PROCESSOR]}. {REMEDY}")
    return result


def settings_of(name: str) -> dict[str, Any]:
    """Returns the content of the files of a processor. Raises ValueError where there are none."""
    return {file: json.loads(content) for file, content in processor_files(name).items()}


def digest_of(files: Mapping[str, bytes]) -> str:
    """Returns a digest of the content of files."""
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()


@contextmanager
def written(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields a folder with the config of a processor."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / PROCESSOR).write_text(json.dumps(config))
        yield folder


def load_processor(name: str, *, what: str | None = None) -> Any:
    """Returns the image processor of a folder or a hub name, of transformers' backend of PIL and numpy if it has one.

    That backend needs no other package, so that images become the same pixels on every machine.

    what: the processor, in messages.

    Raises ValueError where it cannot be loaded here.
    """
    require_extra("images", feature="data of images")
    # Not from `transformers`, whose earlier releases have it there only with torchvision.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(name, backend="pil", trust_remote_code=False)
    except (ImportError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        remedy = "To fix: install torchvision; or give image_size, mean and std" if "torchvision" in reason else REMEDY
        first, _, _ = reason.partition(". ")  # lists of all processors may follow
        raise ValueError(f"processor {what or repr(name)} cannot be loaded: {first:.240}. {remedy}") from error


def normalisation_of(name: str) -> dict[str, Any]:
    """Returns the mean and std, of pixels within 0 and 1, by which the processor of a model normalises them.

    Raises ValueError where it cannot be loaded here.
    """
    own = load_processor(name)
    mean, std = getattr(own, "image_mean", None), getattr(own, "image_std", None)
    if not getattr(own, "do_normalize", False) or mean is None or std is None:
        mean, std = 0.0, 1.0
    scale = 255 * (own.rescale_factor if getattr(own, "do_rescale", False) else 1)
    return {
        key: each if abs(scale - 1) < 1e-6 else _divided(each, scale) for key, each in (("mean", mean), ("std", std))
    }


def _divided(value: Any, by: float) -> Any:
    return [each / by for each in value] if isinstance(value, (list, tuple)) else value / by


class ImageProcessor:
    """An image processor that is called with one image at a time.

    Attributes:
        mode: the mode of the images that it is called with, RGB or L (grey).
        stores_bytes: whether the pixels that it gives are bytes divided by 127.5, less 1. They are then stored as
            bytes, of which `as_tensors` makes the same numbers.
    """

    def __init__(self, processor: Any, *, mode: str, what: str) -> None:
        self._processor, self._what = processor, what
        mean = getattr(processor, "image_mean", None)
        self.mode = "L" if isinstance(mean, (list, tuple)) and len(mean) == 1 else mode
        self._shape: tuple[int, ...] | None = None
        self.stores_bytes = self._gives_bytes()

    def __call__(self, image: Image) -> dict[str, Array]:
        """Returns what the processor makes of an image of the mode: its `pixel_values`, and what comes with them.

        Raises ValueError where it refuses the image, or makes another number of pixels of it than of those before.
        """
        result = self._called(image)
        pixels = result[PIXELS]
        self._shape = self._shape or pixels.shape
        if pixels.shape != self._shape:
            raise ValueError(
                f"processor {self._what} makes {_size(pixels.shape)} of the image, and made {_size(self._shape)} of "
                "another one. To fix: save the images in one size, or give image_size, mean and std, which resize them"
            )
        if self.stores_bytes:
            in_bytes = as_bytes(pixels)
            assert in_bytes is not None, f"{self._what} gives pixels that are not bytes for an image of {image.size}"
            result[PIXELS] = in_bytes
        return result

    def _called(self, image: Image) -> dict[str, Array]:
        try:
            outputs = {
                name: np.asarray(values)[0] for name, values in self._processor(image, return_tensors="np").items()
            }
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise ValueError(
                f"processor {self._what} refuses the image of {image.width} x {image.height} pixels, mode "
                f"{image.mode}: {' '.join(str(error).split()):.240}. To fix: correct its config, or give image_size, "
                "mean and std"
            ) from error
        if PIXELS not in outputs:
            raise ValueError(
                f"processor {self._what} gives {', '.join(outputs)}, and no {PIXELS}. To fix: use another model"
            )
        outputs[PIXELS] = outputs[PIXELS].astype(np.float32)
        if max(outputs[PIXELS].shape[-2:], default=0) > MAX_IMAGE_SIZE:
            raise ValueError(
                f"processor {self._what} makes {_size(outputs[PIXELS].shape)} of the image, and at most "
                f"{MAX_IMAGE_SIZE} a side are read. To fix: give image_size, mean and std, which resize images"
            )
        return outputs

    def _gives_bytes(self) -> bool:
        """Whether the pixels of all images can be stored as bytes: of images that are enlarged, and made smaller."""
        from PIL import Image

        draw = np.random.default_rng(0)
        for width, height in SIZES_TRIED:
            noise = Image.fromarray(draw.integers(256, size=(height, width, 3), dtype=np.uint8)).convert(self.mode)
            try:
                if as_bytes(self._called(noise)[PIXELS]) is None:
                    return False
            except ValueError:  # which the images of the data may not be
                return False
        return True


def as_bytes(pixels: Array) -> Array | None:
    """Returns pixels in -1..1 as bytes; None where they are none of the 256 numbers that bytes stand for."""
    rounded = np.rint((pixels + np.float32(1)) * np.float32(127.5))
    if rounded.min() < 0 or rounded.max() > 255:
        return None
    is_same = np.array_equal(rounded / np.float32(127.5) - np.float32(1), pixels)
    return rounded.astype(np.uint8) if is_same else None


def _size(shape: tuple[int, ...]) -> str:
    """The width and height of pixels, in a message."""
    return f"{shape[-1]} x {shape[-2]} pixels" if len(shape) == 3 else f"an array of {' x '.join(map(str, shape))}"
