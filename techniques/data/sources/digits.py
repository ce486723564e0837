"""scikit-learn's handwritten digits: 1797 images of 8x8 pixels in 10 classes, without a download."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ringmaster.techniques.data.arrays import Array, ColumnWriter, fingerprint
from ringmaster.techniques.data.prepared import Preparation
from ringmaster.techniques.data.splits import is_held_out
from ringmaster.techniques.data.stored_source import StoredSource
from ringmaster.techniques.interface.data_source import PreparedData
from ringmaster.techniques.interface.job import DataSpec

IMAGE_SIZE, NUM_CLASSES = 8, 10


class Digits(StoredSource):
    """Images [1, 8, 8] with their digits. The pixels have mean 0 and standard deviation 1 over the training images."""

    name = "digits"

    def preparation(self, spec: DataSpec, *, cache_dir: Path) -> Preparation:
        """Returns how the images are normalised and divided."""
        return Preparation(
            name=self.name,
            location="sklearn.datasets.load_digits",
            state=None,
            write=lambda folder: _write(folder, share=spec.held_out),
        )


def _write(folder: Path, *, share: float) -> PreparedData:
    pixels, labels = _load()
    held_out = np.array([is_held_out(f"digits/{index}", share=share) for index in range(len(labels))])
    pixels = (pixels - pixels[~held_out].mean()) / pixels[~held_out].std()
    with ColumnWriter(folder) as writer:
        for split, chosen in (("training", ~held_out), ("held_out", held_out)):
            rows = {"pixel_values": pixels[chosen].astype(np.float32), "labels": labels[chosen]}
            writer.append(split, rows)
    return PreparedData(
        name="",
        source="",
        digest=fingerprint(folder),
        kind="images",
        num_labels=NUM_CLASSES,
        image_size=IMAGE_SIZE,
        num_channels=1,
        num_samples=int((~held_out).sum()),
        num_held_out=int(held_out.sum()),
    )


def _load() -> tuple[Array, Array]:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ValueError("data source 'digits' needs scikit-learn. To fix: pip install scikit-learn") from error
    data = load_digits()
    return data.images[:, None].astype(np.float64), data.target.astype(np.int64)
