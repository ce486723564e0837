"""What models read of images: the tokens that stand for an image, and the arrays of its pixels, by family of models."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringmaster.techniques.data.arrow_files import Array
from ringmaster.techniques.data.image_processors import COMBINED_PROCESSOR, PIXELS, load_processor
from ringmaster.techniques.data.images import converted, read_image
from ringmaster.techniques.models.model_folders import read_json

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_MASK, GRID = "pixel_attention_mask", "image_grid_thw"


class ImageLayout(ABC):
    """How a family of models takes images.

    Attributes:
        processors: the names of the family's image processors, as transformers has them.
        placeholder: the special token that chat templates write for an image.
    """

    processors: ClassVar[tuple[str, ...]]
    placeholder: ClassVar[str]

    def __init__(self, processor: Any, *, settings: Mapping[str, Any]) -> None:
        self.processor, self.settings = processor, settings

    @abstractmethod
    def text(self, image: Image, tokenizer: Any) -> str:
        """Returns the special tokens that stand for an image, as text. Raises ValueError where it is refused."""

    @abstractmethod
    def arrays(self, images: Sequence[Image]) -> dict[str, Array]:
        """Returns the arrays of the images of a sample, by the names of `forward`'s arguments.

        Where samples differ in shape, arrays are filled up with 0, which models take for nothing.
        """

    def called(self, images: Sequence[Image], **settings: Any) -> Mapping[str, Any]:
        """Returns what the image processor makes of images. Raises ValueError where it refuses one."""
        try:
            outputs: Mapping[str, Any] = self.processor([[*images]], return_tensors="np", **settings)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RuntimeError) as error:
            sizes = ", ".join(f"{each.width} x {each.height}" for each in images)
            reason = " ".join(str(error).split())
            raise ValueError(
                f"the image processor refuses an image of {sizes} pixels: {reason:.240}. To fix: resize it, or remove "
                "the row"
            ) from error
        return outputs


class TiledImages(ImageLayout):
    """Idefics3 and SmolVLM: an image is divided into tiles of one size, each of which is `image_seq_len` tokens."""

    processors = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
    placeholder = "<image>"

    def text(self, image: Image, tokenizer: Any) -> str:
        """Returns rows of tiles, and the image as a whole."""
        outputs = self.called([image], return_row_col_info=True)
        num_rows, num_columns = (int(np.asarray(outputs[name])[0][0]) for name in ("rows", "cols"))
        around = getattr(tokenizer, "fake_image_token", "<fake_token_around_image>")
        whole = getattr(tokenizer, "global_image_token", "<global-img>")
        tile = self.placeholder * int(self.settings.get("image_seq_len", 169))
        tiles = (
            "".join(f"{around}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(num_columns)) + "\n"
            for row in range(num_rows)
        )
        return "".join(tiles) + ("\n" if num_rows else "") + f"{around}{whole}{tile}{around}"

    def arrays(self, images: Sequence[Image]) -> dict[str, Array]:
        """Returns the pixels of all tiles of all images, [tiles, 3, height, width], and which of them are real."""
        outputs = self.called(images)
        result = {PIXELS: np.asarray(outputs[PIXELS][0], np.float32)}
        if IMAGE_MASK in outputs:
            result[IMAGE_MASK] = np.asarray(outputs[IMAGE_MASK][0]).astype(bool)
        return result


class PatchedImages(ImageLayout):
    """Qwen2-VL and Qwen2.5-VL: an image of any size is divided into patches, of which `merge_size` squared are a token.

    The arrays of a batch have a row for each sample, as batches are divided by rows; models take the patches of all
    images one after another (`ringmaster.features.image_text.trainer`).
    """

    processors = ("Qwen2VLImageProcessor",)
    placeholder = "<|image_pad|>"

    def text(self, image: Image, tokenizer: Any) -> str:
        """Returns one token for each merged patch."""
        grid = np.asarray(self.called([image])[GRID])[0]
        return self.placeholder * (int(grid.prod()) // int(self.processor.merge_size) ** 2)

    def arrays(self, images: Sequence[Image]) -> dict[str, Array]:
        """Returns the patches of all images, [patches, values], and their numbers in each direction, [images, 3]."""
        outputs = self.called(images)
        return {PIXELS: np.asarray(outputs[PIXELS], np.float32), GRID: np.asarray(outputs[GRID], np.int64)}


LAYOUTS: tuple[type[ImageLayout], ...] = (TiledImages, PatchedImages)


def layout_in(folder: str) -> ImageLayout:
    """Returns the layout of the image processor in a folder, or of a model on the hub.

    Raises ValueError where the processor cannot be loaded, or its family is unknown.
    """
    processor = load_processor(folder)
    name = type(processor).__name__.removesuffix("Pil").removesuffix("Fast")
    for layout in LAYOUTS:
        if name in layout.processors:
            return layout(processor, settings=read_json(Path(folder) / COMBINED_PROCESSOR))
    known = ", ".join(each for layout in LAYOUTS for each in layout.processors)
    raise ValueError(
        f"data: kind image-text does not know how models take the images of a {name}. To fix: take a model with one of "
        f"{known}"
    )


class ImageTokens:
    """The tokens of images in rendered conversations.

    token: the number of the placeholder, which is also what stands for each part of an image.
    counts: of each image of the conversation that has had the most tokens of images so far. arrays: of its images.
    """

    def __init__(self, layout: ImageLayout, tokenizer: Any) -> None:
        self.layout, self._tokenizer = layout, tokenizer
        self.token = tokenizer.get_vocab().get(layout.placeholder)
        self._known: dict[str, Array] = {}
        self.counts: list[int] = []
        self.arrays: dict[str, Array] = {}
        if self.token is None:
            raise ValueError(
                f"data: the tokenizer has no token {layout.placeholder}, which stands for an image. To fix: set "
                "data.tokenizer to the one of a model of images and texts"
            )

    def placed(self, tokens: Array, written: Array, images: Sequence[Image], *, max_length: int) -> tuple[Array, Array]:
        """Returns tokens with those of each image in place of its placeholder, and which of them are written by the
        assistant: none of those of images.

        Raises ValueError where there are more or fewer placeholders than images, or where images do not fit.
        """
        places = np.flatnonzero(tokens == self.token)
        if len(places) != len(images):
            raise ValueError(
                f"the rendered conversation has {self.layout.placeholder} {len(places)} times, and the row has "
                f"{len(images)} images. To fix: remove special tokens from the texts, or set data.tokenizer to one "
                "whose chat template renders images"
            )
        parts, marks, counts, before = list[Array](), list[Array](), list[int](), 0
        for place, image in zip(places.tolist(), images, strict=True):
            own = self._encoded(self.layout.text(image, self._tokenizer))
            parts += [tokens[before:place], own]
            marks += [written[before:place], np.zeros(len(own), bool)]
            counts.append(int((own == self.token).sum()))
            before = place + 1
        tokens, written = np.concatenate([*parts, tokens[before:]]), np.concatenate([*marks, written[before:]])
        if (end := 1 + int(np.flatnonzero(tokens == self.token)[-1])) > max_length:
            raise ValueError(
                f"its images end at token {end:,}, and a sample has at most {max_length:,} tokens ({sum(counts):,} "
                f"are of {len(images)} images). To fix: raise data.seq_len, give fewer or smaller images, or remove "
                "the row"
            )
        if sum(counts) > sum(self.counts):
            self.counts, self.arrays = counts, self.layout.arrays(images)
        return tokens, written

    def _encoded(self, text: str) -> Array:
        if text not in self._known:
            ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            self._known[text] = np.asarray(ids, np.int64)
        return self._known[text]


def decoded(value: Any) -> Image:
    """Returns an image in RGB. Raises ValueError where it cannot be read."""
    return converted(read_image(value), mode="RGB")


def file_bytes(value: Any) -> bytes:
    """Returns the bytes of an image's file; of an image that is decoded already, those of a lossless one."""
    from ringmaster.techniques.data.file_patterns import opened

    if hasattr(value, "getbands"):
        stream = io.BytesIO()
        value.save(stream, format="PNG")
        return stream.getvalue()
    if isinstance(value, Mapping):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes):
        return value
    with opened(value) as opened_file:
        return opened_file.read()


def stacked(rows: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Returns arrays of samples as one batch, filled up with 0: {name: [rows, ...]}."""
    result: dict[str, Array] = {}
    for name in rows[0]:
        shapes = np.array([row[name].shape for row in rows])
        result[name] = np.zeros((len(rows), *shapes.max(0)), rows[0][name].dtype)
        for batch_row, row in zip(result[name], rows, strict=True):
            batch_row[tuple(map(slice, row[name].shape))] = row[name]
    return result
