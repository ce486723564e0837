"""Images with a class each: a folder of images by class, a table of paths, or a Hugging Face data set."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ringmaster.techniques.checkpoints.storage import is_url
from ringmaster.techniques.data.file_patterns import MatchedFiles, is_litter, matching, opened
from ringmaster.techniques.data.file_rows import is_held_out, with_leaks
from ringmaster.techniques.data.images import is_image, pixels_of, read_image
from ringmaster.techniques.data.row_files import MAX_FAULTS
from ringmaster.techniques.data.row_source import Columns, RowSource, SampleContext
from ringmaster.techniques.data_source import MAX_SHOWN, DataOptions, PreparedData, Row, column, shown
from ringmaster.techniques.job import DataSpec

PROCESSOR = "preprocessor_config.json"
MAX_IMAGE_SIZE = 4096
IN_FOLDERS = ("image", "label")
"""What is known of an image in a folder, as if it were the columns of a table."""
SPLITS = frozenset({"train", "training", "test", "val", "valid", "validation", "eval", "dev"})


@dataclass(frozen=True, kw_only=True)
class ImageOptions(DataOptions):
    """The columns of images and of their classes, and how pixels are read; see `ImageClassification`."""

    image_column: str | None = column("image", "img", "path", "file_name", "file")
    label_column: str | None = column("label", "labels", "class")
    labels: tuple[str, ...] = ()
    image_size: int = 224
    mean: Any = 0.5
    std: Any = 0.5
    mode: str = "RGB"
    processor: str | None = None

    @cached_property
    def resolved(self) -> ImageOptions:
        """The options with those that the config of the processor has."""
        return self if self.processor is None else replace(self, processor=None, **_read_processor(str(self.processor)))


class ImageClassification(RowSource):
    """Square images, [3, size, size], with the numbers of their classes.

    The class of an image in a folder is the name of the folder that it lies in. A table names each image's file,
    relative to the table. Images are turned as their EXIF orientation says, resized to `image_size` pixels, without
    keeping their proportions, and normalised with `mean` and `std`, as transformers' ViTImageProcessor does.
    `processor` is a folder or hub name from whose preprocessor_config.json these are read instead. mode: "RGB" (3
    channels) or "L" (grey, 1 channel).
    """

    name = "image-classification"
    version = 2
    pads = False
    reads_images = True
    keeps_files = False  # images are files of their own, and their pixels take more space than the files
    options_class = ImageOptions

    def check(self, spec: DataSpec) -> None:
        """Refuses unknown options, and modes other than RGB and L."""
        super().check(spec)
        how = self.options(spec)
        if how.mode not in ("RGB", "L"):
            raise ValueError(f"data: mode {how.mode!r} of images is unknown. To fix: give RGB or L")
        if not 1 <= how.image_size <= MAX_IMAGE_SIZE:
            raise ValueError(
                f"data: image_size {how.image_size} is not within 1 and {MAX_IMAGE_SIZE}. To fix: lower it"
            )
        for name, each in (("mean", how.mean), ("std", how.std)):
            numbers = each if isinstance(each, (list, tuple)) else [each]
            is_right = all(isinstance(number, (int, float)) and math.isfinite(number) for number in numbers)
            if not is_right or len(numbers) not in (1, len(how.mode)) or (name == "std" and 0 in numbers):
                raise ValueError(f"data: {name} {each!r} is wrong. To fix: give one number, or one for each channel")

    def columns(self, spec: DataSpec, available: Sequence[str] | None = None) -> Columns:
        """Returns the columns; those of images in a folder are the roles."""
        if images_of(spec) is not None:
            available = IN_FOLDERS
        return super().columns(spec, available)

    def origin(self, spec: DataSpec) -> tuple[str, Any]:
        """Returns where the images come from, and what changes as soon as they do."""
        if (result := images_of(spec)) is None:
            return super().origin(spec)
        _check_folders(result)
        files = [result.state(), None if spec.held_out_path is None else matching(spec.held_out_path).state()]
        return spec.path or "", {"form": "arrow", "version": self.version, "files": files}

    def write_origin(self, folder: Path, spec: DataSpec, *, cache_dir: Path) -> PreparedData:
        """Writes the images of a folder, or those of a table; files that are left out are for people to know."""
        if (images := images_of(spec)) is None:
            return super().write_origin(folder, spec, cache_dir=cache_dir)
        prepared = self.write(folder, spec, where=f"path {spec.path!r}", cache_dir=cache_dir)
        if spec.held_out_path is not None:
            prepared = with_leaks(prepared, spec, self)
        return replace(prepared, notes=(*prepared.notes, *_merged_folders(images), *_left_out(images, spec)))

    def rows_of_path(self, spec: DataSpec) -> Iterator[Row]:
        """Yields the images of a folder, or the rows of a table."""
        result = images_of(spec)
        if result is None:
            yield from super().rows_of_path(spec)
            return
        for name in result.names:
            held_out = spec.held_out_path is None and is_held_out(name, share=spec.held_out)
            yield _row(result, name, held_out=held_out)
        if spec.held_out_path is not None:
            others = matching(spec.held_out_path)
            yield from (_row(others, name, held_out=True) for name in others.names if is_image(name))

    def identity_of(self, spec: DataSpec) -> Callable[[Row], Any]:
        """Returns a function of a row whose result is the same for the same image, whatever it is called."""
        columns = self.columns(spec)

        def identity(row: Row) -> str:
            with opened(self.values(row, columns, spec=spec)["image"]) as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]

        return identity

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the pixels, as bytes for the default normalisation and else normalised, and the label."""
        how: ImageOptions = context.options.resolved
        pixels = pixels_of(read_image(row["image"]), mode=how.mode, size=how.image_size)
        if (how.mean, how.std) != (0.5, 0.5):
            mean, std = (np.asarray(each, np.float32).reshape(-1, 1, 1) for each in (how.mean, how.std))
            pixels = (pixels.astype(np.float32) / 255 - mean) / std
        return {"pixel_values": pixels, "labels": context.labels.number(row["label"])}

    def write(self, folder: Path, spec: DataSpec, *, where: str, cache_dir: Path) -> PreparedData:
        """Writes the samples, and the config of a processor that makes them."""
        how = self.options(spec).resolved
        (folder / "processor").mkdir()
        size, mean, std = how.image_size, how.mean, how.std
        channels = 3 if how.mode == "RGB" else 1
        config = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "do_normalize": True,
            "do_rescale": True,
            "size": {"height": size, "width": size},
            "image_mean": mean if isinstance(mean, list) else [mean] * channels,
            "image_std": std if isinstance(std, list) else [std] * channels,
        }
        (folder / "processor" / PROCESSOR).write_text(json.dumps(config, indent=1))
        return super().write(folder, spec, where=where, cache_dir=cache_dir)


def images_of(spec: DataSpec) -> MatchedFiles | None:
    """The images that the path matches, or None where it matches tables."""
    if spec.path is None:
        return None
    result = matching(spec.path)
    images = tuple(name for name in result.names if is_image(name))
    return replace(result, names=images) if images else None


def _check_folders(files: MatchedFiles) -> None:
    """Raises ValueError where the folder that an image lies in is not its class.

    It is not where there is a folder for each split, which would be trained on together, or where a folder holds images
    and folders of images.
    """
    outermost = {name.split("/")[0] for name in files.names if name.count("/") > 1}
    if len(outermost) > 1 and outermost <= SPLITS:
        raise ValueError(
            f"{files.root} has a folder for each of {', '.join(sorted(outermost))}. To fix: set path to the one to "
            "train on, and held_out_path to the one to evaluate on"
        )
    folders = {PurePosixPath(name).parent for name in files.names}
    mixed = folders & {above for folder in folders for above in folder.parents}
    if stray := [name for name in files.names if PurePosixPath(name).parent in mixed]:
        places = ", ".join(map(files.path, stray[:MAX_FAULTS])) + (", ..." if len(stray) > MAX_FAULTS else "")
        number = "1 image lies" if len(stray) == 1 else f"{len(stray)} images lie"
        raise ValueError(
            f"{number} beside folders of images, where the class of an image is the folder that it lies in: {places}. "
            "To fix: move all images of a class into one folder, or remove them"
        )


def _merged_folders(images: MatchedFiles) -> Iterator[str]:
    """Yields the folders that are one class, as they have one name in several folders.

    These may be parts of the data (2021/cat, 2022/cat), or else the classes (cat/2021, dog/2021).
    """
    folders: dict[str, set[str]] = {}
    for folder in (PurePosixPath(name).parent for name in images.names):
        folders.setdefault(folder.name, set()).add(str(folder))
    merged = [f"{' and '.join(sorted(each)[:MAX_SHOWN])} as {name}" for name, each in folders.items() if len(each) > 1]
    if merged:
        yield f"folders of one name are one class: {shown(merged)}"


def _left_out(images: MatchedFiles, spec: DataSpec) -> Iterator[str]:
    """Yields what is in a folder of images, and is not read."""
    if spec.path is None or not spec.path.startswith(f"{images.root.rstrip('/')}/**"):
        return
    others = Counter(PurePosixPath(name).suffix.lower() for name in matching(spec.path).names if not is_image(name))
    if others:
        kinds = (f"{number:,} {suffix or 'without an ending'}" for suffix, number in sorted(others.items()))
        yield f"files left out, as they do not end as images do: {', '.join(kinds)}"
    classes = {name.split("/")[0] for name in images.names}
    folders = (each.name for each in Path(images.root).iterdir() if each.is_dir()) if not is_url(images.root) else ()
    if empty := sorted(name for name in {*folders} - classes if not is_litter(name)):
        yield f"folders without images: {shown(empty)}"


def _row(files: MatchedFiles, name: str, *, held_out: bool) -> Row:
    path = files.path(name)
    content = {"image": path, "label": Path(path).parent.name}
    return Row(file=path, number=1, value=content, content=content, held_out=held_out)


def _one(values: Any) -> Any:
    """One number for all channels where they have the same."""
    return values[0] if isinstance(values, list) and len(set(values)) == 1 else values


def _read_processor(name: str) -> dict[str, Any]:
    """The size and the normalisation in the preprocessor_config.json of a folder, or of a model on the hub."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        file = Path(name) / PROCESSOR if Path(name).is_dir() else Path(hf_hub_download(name, PROCESSOR))
        config = json.loads(file.read_text(encoding="utf-8"))
        size = config["crop_size"] if config.get("do_center_crop") else config["size"]
        pixels = size if isinstance(size, int) else size.get("height") or size["shortest_edge"]
        mean, std = (config["image_mean"], config["image_std"]) if config.get("do_normalize", True) else (0.0, 1.0)
        is_grey = isinstance(config["image_mean"], list) and len(config["image_mean"]) == 1
        mode = {"mode": "L"} if is_grey else {}
        return {"image_size": int(pixels), "mean": _one(mean), "std": _one(std), **mode}
    except (OSError, ValueError, KeyError, HfHubHTTPError, HFValidationError) as error:
        raise ValueError(
            f"processor {name!r} cannot be read: {' '.join(str(error).split())}. To fix: give a folder with "
            f"{PROCESSOR}, or a hub name; or give image_size, mean and std"
        ) from error
