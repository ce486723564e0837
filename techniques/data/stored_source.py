"""Base class of data sources whose samples are stored as columns in the cache of prepared data."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ringmaster.techniques.data.arrays import SPLITS, Array, blocks, fingerprint, open_columns
from ringmaster.techniques.data.prepared import Preparation, prepare_once
from ringmaster.techniques.data.samples import ArraySamples, as_tensors
from ringmaster.techniques.data.training_faults import constant_fault, distinct_labels
from ringmaster.techniques.interface.data_source import Dataset, DataSource, PreparedData, check_same
from ringmaster.techniques.interface.job import DataSpec

if TYPE_CHECKING:
    import torch


class StoredSource(DataSource):
    """Writes columns once for each state of the data; batches are read from the memory-mapped columns."""

    @abstractmethod
    def preparation(self, spec: DataSpec, *, cache_dir: Path) -> Preparation:
        """Returns how the samples of `spec` are prepared. It is cheap: it reads no content."""

    def collate(self, columns: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Returns the batch of some rows of the stored columns, {name: [rows, ...]}.

        A row of the batch must not depend on the other rows: ranks and micro-batches divide them in any way. By
        default see `as_tensors`.
        """
        return as_tensors(columns)

    def prepare(self, spec: DataSpec, *, cache_dir: Path) -> PreparedData:
        """Returns the prepared data: from the cache where it is there, or else written now."""
        settings = replace(spec, padding=DataSpec.padding, sampling=DataSpec.sampling)  # of batches, not of samples
        return prepare_once(self.preparation(spec, cache_dir=cache_dir), settings=settings, cache_dir=cache_dir)

    def open(self, spec: DataSpec, *, cache_dir: Path, prepared: PreparedData | None) -> tuple[Dataset, Dataset]:
        """Opens the samples of `prepared` where this machine has them, or else prepares them."""
        found = self.found(spec, cache_dir=cache_dir, prepared=prepared)
        training, held_out = (open_columns(Path(found.folder), split) for split in ("training", "held_out"))
        return ArraySamples(training, collate=self.collate), ArraySamples(held_out, collate=self.collate)

    def found(self, spec: DataSpec, *, cache_dir: Path, prepared: PreparedData | None) -> PreparedData:
        """Returns `prepared` where this machine has its samples, or else prepares them; see `open` for errors."""
        if prepared is not None and Path(prepared.folder, "prepared.json").is_file():
            return prepared
        found = self.prepare(spec, cache_dir=cache_dir)
        if prepared is not None:
            check_same(found, prepared)
        return found


def described(
    folder: Path, *, num_labels: int | None = None, vocab_size: int | None = None, end_of_text_id: int | None = None
) -> PreparedData:
    """Returns the description of the columns that were written into `folder`.

    Where they are not given, the numbers of labels and of token ids are one more than the largest.
    """
    columns = [open_columns(folder, name) for name in ("training", "held_out")]
    shapes = {name: column.shape[1:] for name, column in columns[0].items()}
    image = shapes.get("pixel_values", ())
    kind = "tokens" if "input_ids" in shapes else "images" if image else "other"
    num_samples, num_held_out = (max((len(column) for column in part.values()), default=0) for part in columns)

    def num_values(name: str) -> int:
        there = (split for split, part in zip(SPLITS, columns, strict=True) if name in part)
        return 1 + max((0, *(int(values.max()) for split in there for values in blocks(folder, split, name))))

    if num_labels is None and shapes.get("labels") == () and columns[0]["labels"].dtype.kind in "iu":
        num_labels = num_values("labels")
    faults = []
    if shapes.get("labels") == () and len(same := distinct_labels(folder, "training")) == 1:
        faults.append(constant_fault(map(str, *same), num_rows=num_samples, column="label"))
    if vocab_size is None and kind == "tokens":
        vocab_size = num_values("input_ids")
    return PreparedData(
        name="",
        source="",
        digest=fingerprint(folder),
        kind=kind,
        num_labels=num_labels,
        num_samples=num_samples,
        num_held_out=num_held_out,
        vocab_size=vocab_size,
        end_of_text_id=end_of_text_id,
        seq_len=shapes["input_ids"][0] if kind == "tokens" else None,
        image_size=image[-1] if len(image) == 3 and image[-1] == image[-2] else None,
        num_channels=image[0] if len(image) == 3 else None,
        training_faults=tuple(faults),
    )
