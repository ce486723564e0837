"""Reads images as viewers show them, in colours of 8 bits."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from ringmaster.extras import require_extra
from ringmaster.techniques.data.arrow_files import Array
from ringmaster.techniques.data.file_patterns import opened

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000")
"""The formats that are read. For some others PIL starts a program, such as Ghostscript for EPS."""
REMEDY = "To fix: replace the file, or remove it"
HAS_FRAMES = "has_frames"
"""What the `info` of an image that was read says: whether its file has frames after the first one, which is read."""


def is_image(name: str) -> bool:
    """Returns whether a file has the name of an image that is read."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def read_image(value: Any, *, what: str = "the image") -> Image:
    """Returns the image at a path or URL, in the bytes of a file, or of `datasets`, as viewers show it.

    what: an image without a path, in messages.

    Raises ValueError where it cannot be read.
    """
    require_extra("images", feature="data of images")
    if hasattr(value, "getbands"):
        return _turned(value)
    if isinstance(value, Mapping):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes):
        return _decoded(io.BytesIO(value), what)
    if not isinstance(value, str):
        raise ValueError(f"{what} is {type(value).__name__}. To fix: give the path of its file")
    with opened(value) as stream:
        return _decoded(stream, value)


def pixels_of(image: Image, *, mode: str, size: int | None = None) -> Array:
    """Returns the pixels of an image in the mode RGB or L: bytes [channels, height, width].

    size: the height and width to which the image is resized.

    Raises ValueError as `converted` does.
    """
    from PIL.Image import Resampling

    image = converted(image, mode=mode)
    pixels = np.asarray(image if size is None else image.resize((size, size), Resampling.BILINEAR))
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)


def converted(image: Image, *, mode: str) -> Image:
    """Returns an image in the mode RGB or L, with what is transparent in it over white.

    What lies under transparent pixels is what a program happened to write there, often black all over.

    Raises ValueError where pixels have more than 8 bits: Pillow cuts them off at 255, here and where a `pipeline` of
    transformers serves the model.
    """
    from PIL import Image as images

    if image.mode.startswith(("I", "F")):
        raise ValueError(
            f"the image has pixels of more than 8 bits (mode {image.mode}), of which the brighter ones would all "
            "become white. To fix: save it with 8 bits, scaled as fits its content, e.g. magick IN -depth 8 OUT"
        )
    if is_transparent(image):
        image = image.convert("RGBA")
        image = images.alpha_composite(images.new("RGBA", image.size, "white"), image)
    return image.convert(mode)


def is_transparent(image: Image) -> bool:
    """Returns whether an image has pixels that are not opaque."""
    has_alpha = "A" in image.getbands() or image.info.get("transparency") is not None
    return has_alpha and image.convert("RGBA").getchannel("A").getextrema() != (255, 255)


def _decoded(stream: BinaryIO, what: str) -> Image:
    """The image in a file. Raises ValueError, with what is read, for all that PIL raises on broken and other files."""
    from PIL import Image, UnidentifiedImageError

    try:
        return _turned(Image.open(stream, formats=FORMATS))
    except UnidentifiedImageError as error:
        stream.seek(0)
        begin = stream.read(16).ljust(16, b"\0")
        name = next((name for name, (_, accepts) in Image.OPEN.items() if accepts and accepts(begin)), FORMATS[0])
        problem = "not an image that can be read" if name in FORMATS else f"{name}, not one of {', '.join(FORMATS)}"
        raise ValueError(f"{what} is {problem}. {REMEDY}") from error
    except (
        OSError, EOFError, SyntaxError, ValueError, struct.error, zlib.error, Image.DecompressionBombError
    ) as error:  # fmt: skip
        raise ValueError(f"{what} cannot be read: {error}. {REMEDY}") from error


def _turned(image: Image) -> Image:
    """The image, decoded, as its EXIF orientation says: cameras write pixels in the orientation of their sensor."""
    from PIL.ImageOps import exif_transpose

    image.load()
    try:
        result = exif_transpose(image)
    except (SyntaxError, ValueError, struct.error):  # as broken EXIF says nothing
        result = image.copy()
    # An image of `datasets` is turned twice. Cameras write previews as other frames of a photograph (MPO).
    has_frames = image.format != "MPO" and getattr(image, "is_animated", False)
    result.info[HAS_FRAMES] = has_frames or image.info.get(HAS_FRAMES, False)
    return result
