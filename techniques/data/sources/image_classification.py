"""Images with a class each: a folder of images by class, a table of paths, or a Hugging Face data set."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import numpy as np

from ringmaster.techniques.checkpoints.storage import is_url
from ringmaster.techniques.data.file_patterns import MatchedFiles, is_litter, matching, opened
from ringmaster.techniques.data.file_rows import is_held_out, with_leaks
from ringmaster.techniques.data.image_processors import (
    MAX_IMAGE_SIZE,
    PIXELS,
    PROCESSOR,
    ImageProcessor,
    as_bytes,
    digest_of,
    load_processor,
    processor_files,
    written,
)
from ringmaster.techniques.data.images import HAS_FRAMES, converted, is_image, is_transparent, read_image
from ringmaster.techniques.data.row_files import MAX_FAULTS
from ringmaster.techniques.data.row_kind import IMAGE
from ringmaster.techniques.data.row_source import Columns, RowSource, SampleContext
from ringmaster.techniques.data_source import MAX_SHOWN, DataOptions, PreparedData, Row, column, shown
from ringmaster.techniques.job_features import Description
from ringmaster.techniques.job_specs import DataSpec

IN_FOLDERS = ("image", "label")
"""What is known of an image in a folder, as if it were the columns of a table."""
HOW = frozenset({"image_size", "mean", "std", "processor"})
"""The options that define how images are resized and normalised."""
SPLITS = frozenset({"train", "training", "test", "val", "valid", "validation", "eval", "dev"})


@dataclass(frozen=True, kw_only=True)
class ImageOptions(DataOptions):
    """The columns of images and of their classes, and how pixels are read; see `ImageClassification`."""

    image_column: Annotated[str | None, Description("the column that holds the path of an image, such as file")] = (
        column("image", "img", "path", "file_name", "file")
    )
    label_column: str | None = column("label", "labels", "class")
    labels: tuple[str, ...] = ()
    image_size: int = 224
    mean: Any = 0.5
    std: Any = 0.5
    mode: str = "RGB"
    processor: str | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The config of the processor that these options describe, where they name none."""
        channels, size = 3 if self.mode == "RGB" else 1, self.image_size
        mean, std = (list(each) if isinstance(each, (list, tuple)) else [each] for each in (self.mean, self.std))
        return {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "do_normalize": True,
            "do_rescale": True,
            "size": {"height": size, "width": size},
            "image_mean": mean * channels if len(mean) == 1 else mean,
            "image_std": std * channels if len(std) == 1 else std,
        }

    @property
    def files(self) -> dict[str, bytes]:
        """The files of the processor. Raises ValueError where it has none."""
        if self.processor is not None:
            return processor_files(self.processor)
        return {PROCESSOR: json.dumps(self.config, indent=1).encode()}

    def loaded(self) -> Any:
        """Returns transformers' processor. Raises ValueError where it cannot be loaded here."""
        if self.processor is not None:
            return load_processor(self.processor)
        with written(self.config) as folder:
            return load_processor(folder, what=self._what)

    @cached_property
    def image_processor(self) -> ImageProcessor:
        """The processor, for images one after the other. Raises ValueError where it cannot be loaded here."""
        return ImageProcessor(self.loaded(), mode=self.mode, what=self._what)

    @property
    def _what(self) -> str:
        return "of image_size, mean and std" if self.processor is None else repr(self.processor)


class ImageClassification(RowSource):
    """Images, [channels, height, width], with the numbers of their classes.

    The class of an image in a folder is the name of the folder that it lies in. A table names each image's file,
    relative to the table. Images are turned according to their EXIF orientation, and what is transparent becomes white.
    `processor` is a folder or hub name with an image processor of transformers, which is then called. By default this
    is a ViTImageProcessor: it resizes images to `image_size` pixels, without keeping their proportions, and normalises
    them with `mean` and `std`. mode: "RGB" (3 channels) or "L" (grey, 1 channel).

    counts: how many images of the data that is being written are of a kind that users should know of.
    """

    name = "image-classification"
    version = 3
    pads = False
    file_role = IMAGE
    keeps_files = False  # images are files of their own, and their pixels take more space than the files
    options_class = ImageOptions
    counts: Counter[str] | None = None

    def check(self, spec: DataSpec) -> None:
        """Refuses unknown options, modes other than RGB and L, and options that cannot be combined with a processor."""
        super().check(spec)
        how = self.options(spec)
        if how.processor is not None and (both := HOW & ({*spec.kwargs, *spec.options} - {"processor"})):
            raise ValueError(
                f"data: {', '.join(sorted(both))} and processor both define how images are resized and normalised. To "
                "fix: remove one of them"
            )
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
        how = self.options(spec)
        processor = {} if how.processor is None else {"processor": digest_of(how.files)}
        if (result := images_of(spec)) is None:
            location, state = super().origin(spec)
            return location, {**state, **processor}
        _check_folders(result)
        files = [result.state(), None if spec.held_out_path is None else matching(spec.held_out_path).state()]
        return spec.path or "", {"form": "arrow", "version": self.version, "files": files, **processor}

    def write_origin(self, folder: Path, spec: DataSpec, *, cache_dir: Path) -> PreparedData:
        """Writes the images of a folder, or those of a table; files that are left out are reported."""
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
        """Returns what the processor makes of the image, pixels as bytes where these are exact, and the label."""
        processor: ImageProcessor = context.options.image_processor
        image = read_image(row["image"])
        inputs = processor(converted(image, mode=processor.mode))
        if self.counts is not None:
            is_coloured = processor.mode == "L" and image.mode not in ("1", "L", "LA")
            self.counts.update(
                {
                    "transparent": is_transparent(image),
                    "animated": image.info.get(HAS_FRAMES, False),
                    "coloured": is_coloured,
                }
            )
        return {**inputs, "labels": context.labels.number(row["label"])}

    def reference(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns what transformers' processor, loaded again, makes of the image; pixels in the form of `sample`."""
        how: ImageOptions = context.options
        image = converted(read_image(row["image"]), mode=how.image_processor.mode)
        result = {name: np.asarray(values)[0] for name, values in how.loaded()([image], return_tensors="np").items()}
        if how.image_processor.stores_bytes and (in_bytes := as_bytes(result[PIXELS])) is not None:
            result[PIXELS] = in_bytes
        return result

    def write(self, folder: Path, spec: DataSpec, *, where: str, cache_dir: Path) -> PreparedData:
        """Writes the samples, and the files of the processor that makes them, as they are."""
        how: ImageOptions = self.options(spec)
        how.loaded()  # what cannot be loaded is refused once, and not with each row
        (folder / "processor").mkdir()
        for name, content in how.files.items():
            (folder / "processor" / name).write_bytes(content)
        kind, counts = copy.copy(self), Counter[str]()
        kind.counts = counts
        prepared = super(ImageClassification, kind).write(folder, spec, where=where, cache_dir=cache_dir)
        return replace(prepared, notes=(*prepared.notes, *_unusual(counts)))


def _unusual(counts: Counter[str]) -> Iterator[str]:
    """Yields what users should know of images that are not read as they may expect."""
    for name, what in (
        ("transparent", "with transparent parts, which become white here; a pipeline of transformers drops alpha"),
        ("animated", "with several frames or pages, of which the first one is read"),
        ("coloured", "in colour, which are read as grey (mode L)"),
    ):
        if number := counts[name]:
            yield f"{number:,} {'image' if number == 1 else 'images'} {what}"


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
            f"{number} next to folders of images, where the class of an image is the folder that it lies in: {places}. "
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
