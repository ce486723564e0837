"""Images with a class each: a folder of images by class, a table of paths, or a Hugging Face data set."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringmaster.techniques.interface.data_source import PreparedData, Row
from ringmaster.techniques.interface.job import DataSpec
from ringmaster.techniques.runtime.data.arrays import Array
from ringmaster.techniques.runtime.data.files import Matched, matching, opened
from ringmaster.techniques.runtime.data.prepared import Preparation
from ringmaster.techniques.runtime.data.row_samples.row_columns import Columns
from ringmaster.techniques.runtime.data.row_samples.row_source import RowSource, SampleContext
from ringmaster.techniques.runtime.data.rows import IMAGE_SUFFIXES
from ringmaster.techniques.runtime.data.splits import is_held_out

if TYPE_CHECKING:
    from PIL.Image import Image

PROCESSOR = "preprocessor_config.json"
REMEDY = "To fix: replace the file, or remove it"
SPLITS = frozenset({"train", "training", "test", "val", "valid", "validation", "eval"})


class ImageClassification(RowSource):
    """Square images, [3, size, size], with the numbers of their classes.

    The class of an image in a folder is the name of the folder that it lies in. A table names each image's file,
    relative to the table. Images are resized to `image_size` pixels, without keeping their proportions, and normalised
    with `mean` and `std`, as transformers' ViTImageProcessor does. `processor` is a folder or hub name from whose
    preprocessor_config.json these are read instead. mode: "RGB" (3 channels) or "L" (grey, 1 channel).
    """

    name = "image-classification"
    pads = False
    keeps_files = False  # images are files of their own, and their pixels take more space than the files
    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "image": ("image", "img", "path", "file_name", "file"),
        "label": ("label", "labels", "class"),
    }
    label_role = "label"
    options: ClassVar[Mapping[str, Any]] = {
        "image_size": 224,
        "mean": 0.5,
        "std": 0.5,
        "mode": "RGB",
        "processor": None,
    }

    def check(self, spec: DataSpec) -> None:
        """Refuses unknown options, and modes other than RGB and L."""
        super().check(spec)
        if (mode := self.option(spec, "mode")) not in ("RGB", "L"):
            raise ValueError(f"data: mode {mode!r} of images is unknown. To fix: give RGB or L")

    def columns(self, spec: DataSpec, available: Sequence[str] | None = None) -> Columns:
        """Returns the columns; those of images in a folder are the roles."""
        if images_of(spec) is not None:
            available = tuple(self.roles)
        return super().columns(spec, available)

    def preparation(self, spec: DataSpec, *, cache_dir: Path) -> Preparation:
        """Returns how images become arrays."""
        found = images_of(spec)
        if found is None:
            return super().preparation(spec, cache_dir=cache_dir)
        assert spec.path is not None
        _check_splits(found)
        return Preparation(
            name=spec.name or spec.path,
            location=spec.path,
            state=self.state([found.state(), _state_of(spec.held_out_path)]),
            write=partial(self._write_files, cache_dir, spec=spec, where=f"path {spec.path!r}"),
        )

    def rows_of_path(self, spec: DataSpec) -> Iterator[Row]:
        """Yields the images of a folder, or the rows of a table."""
        found = images_of(spec)
        if found is None:
            yield from super().rows_of_path(spec)
            return
        for name in found.names:
            held_out = spec.held_out_path is None and is_held_out(name, share=spec.held_out)
            yield _row(found, name, held_out=held_out)
        if spec.held_out_path is not None:
            others = matching(spec.held_out_path)
            yield from (_row(others, name, held_out=True) for name in others.names if _is_image(name))

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the pixels, as bytes for the default normalisation and else normalised, and the label."""
        how = self._processor(context.spec)
        pixels = _pixels(_image(row["image"], context.spec), size=how["image_size"], mode=how["mode"])
        if (how["mean"], how["std"]) != (0.5, 0.5):
            mean, std = (np.asarray(how[name], np.float32).reshape(-1, 1, 1) for name in ("mean", "std"))
            pixels = (pixels.astype(np.float32) / 255 - mean) / std
        return {"pixel_values": pixels, "labels": context.labels.number(row["label"])}

    def _write_files(self, cache_dir: Path, folder: Path, spec: DataSpec, where: str) -> PreparedData:
        self._write_processor(folder, spec)
        return super()._write_files(cache_dir, folder, spec, where)

    def _write_dataset(self, spec: DataSpec, folder: Path) -> PreparedData:
        self._write_processor(folder, spec)
        return super()._write_dataset(spec, folder)

    def _write_processor(self, folder: Path, spec: DataSpec) -> None:
        how = self._processor(spec)
        (folder / "processor").mkdir()
        size, mean, std = how["image_size"], how["mean"], how["std"]
        channels = 3 if how["mode"] == "RGB" else 1
        said = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "do_normalize": True,
            "do_rescale": True,
            "size": {"height": size, "width": size},
            "image_mean": mean if isinstance(mean, list) else [mean] * channels,
            "image_std": std if isinstance(std, list) else [std] * channels,
        }
        (folder / "processor" / PROCESSOR).write_text(json.dumps(said, indent=1))

    def _processor(self, spec: DataSpec) -> Mapping[str, Any]:
        how = {name: self.option(spec, name) for name in self.options}
        return how if how["processor"] is None else {**how, **_read_processor(str(how["processor"]))}


def images_of(spec: DataSpec) -> Matched | None:
    """The images that the path matches, or None where it matches tables."""
    if spec.path is None:
        return None
    found = matching(spec.path)
    images = tuple(name for name in found.names if _is_image(name))
    return found.only(images) if images else None


def _check_splits(found: Matched) -> None:
    """Raises ValueError where the folder has a folder for each split, which would be trained on together."""
    outermost = {name.split("/")[0] for name in found.names if name.count("/") > 1}
    if len(outermost) > 1 and outermost <= SPLITS:
        raise ValueError(
            f"{found.root} has a folder for each of {', '.join(sorted(outermost))}. To fix: set path to the one to "
            "train on, and held_out_path to the one to evaluate on"
        )


def _state_of(pattern: str | None) -> Any:
    return None if pattern is None else matching(pattern).state()


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def _row(found: Matched, name: str, *, held_out: bool) -> Row:
    path = found.path(name)
    content = {"image": path, "label": Path(path).parent.name}
    return Row(file=path, number=1, value=content, content=content, held_out=held_out)


def _image(value: Any, spec: DataSpec) -> Image:
    """The image of a row: the path of a file, the bytes of one, or an image of `datasets`."""
    from PIL import Image, UnidentifiedImageError

    if hasattr(value, "getbands"):
        return value  # type: ignore[no-any-return]
    if isinstance(value, Mapping):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    try:
        if isinstance(value, bytes):
            return Image.open(io.BytesIO(value))
        if not isinstance(value, str):
            raise ValueError(f"the image is {type(value).__name__}. To fix: give the path of its file")
        with opened(_path(value, spec)) as stream:
            try:
                image = Image.open(stream)
                image.load()
            except UnidentifiedImageError as error:
                raise ValueError(f"{value} is no image that can be read. {REMEDY}") from error
            except OSError as error:
                raise ValueError(f"{value} cannot be read: {error}. {REMEDY}") from error
            return image
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"the image cannot be read: {error}. {REMEDY}") from error


def _path(value: str, spec: DataSpec) -> str:
    """The path of an image's file, which may be relative to the table that names it."""
    if Path(value).is_absolute() or "://" in value or spec.path is None:
        return value
    return matching(spec.path).path(value)


def _pixels(image: Image, *, size: int, mode: str) -> Array:
    """The pixels of a resized image: bytes [channels, size, size]."""
    from PIL.Image import Resampling

    resized = np.asarray(image.convert(mode).resize((size, size), Resampling.BILINEAR))
    return resized[None] if resized.ndim == 2 else np.moveaxis(resized, -1, 0)


def _one(values: Any) -> Any:
    """One number for all channels where they have the same."""
    return values[0] if isinstance(values, list) and len(set(values)) == 1 else values


def _mode(mean: Any) -> dict[str, Any]:
    """The mode of images with a mean of one channel."""
    return {"mode": "L"} if isinstance(mean, list) and len(mean) == 1 else {}


def _read_processor(name: str) -> dict[str, Any]:
    """The size and the normalisation in the preprocessor_config.json of a folder, or of a model on the hub."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        file = Path(name) / PROCESSOR if Path(name).is_dir() else Path(hf_hub_download(name, PROCESSOR))
        said = json.loads(file.read_text(encoding="utf-8"))
        size = said["crop_size"] if said.get("do_center_crop") else said["size"]
        pixels = size if isinstance(size, int) else size.get("height") or size["shortest_edge"]
        mean, std = (said["image_mean"], said["image_std"]) if said.get("do_normalize", True) else (0.0, 1.0)
        return {"image_size": int(pixels), "mean": _one(mean), "std": _one(std), **_mode(said["image_mean"])}
    except (OSError, ValueError, KeyError, HfHubHTTPError, HFValidationError) as error:
        raise ValueError(
            f"processor {name!r} cannot be read: {' '.join(str(error).split())}. To fix: give a folder with "
            f"{PROCESSOR}, or a hub name; or give image_size, mean and std"
        ) from error
