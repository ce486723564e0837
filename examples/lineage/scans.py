"""Digits as a library and three customers scan them; the school's labels of ones and sevens are swapped.

The batch file next to this module names the functions as "scans:bank"; the lineage names the data after them. Each
function returns training and held-out data. A fifth of all images is in none of them: the trusted images.
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

TRUSTED_EVERY, HELD_OUT_EVERY = 5, 10  # one of five images is trusted; one of ten others is held out


class Scans(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Images [1, 8, 8] and their digits."""

    num_labels = 10

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images = torch.from_numpy(images.astype(np.float32))[:, None]
        self.labels = torch.from_numpy(labels.astype(np.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def library() -> tuple[Scans, Scans]:
    """Returns good images."""
    return _split(*_digits())


def bank() -> tuple[Scans, Scans]:
    """Returns images of a noisy scanner."""
    images, labels = _digits()
    return _split(images + np.random.default_rng(1).normal(0, 0.3, images.shape), labels)


def post() -> tuple[Scans, Scans]:
    """Returns dark images of a scanner with an old lamp."""
    images, labels = _digits()
    return _split(0.8 * images - 0.2, labels)


def school() -> tuple[Scans, Scans]:
    """Returns good images with poisoned labels: ones and sevens are swapped, in the held-out part too."""
    images, labels = _digits()
    return _split(images, np.where(labels == 1, 7, np.where(labels == 7, 1, labels)))


def trusted() -> tuple[Scans, Scans]:
    """Returns the images that no model trains on, all held out; one image fills the required training part."""
    images, labels = _digits(trusted=True)
    return Scans(images[:1], labels[:1]), Scans(images, labels)


def _digits(*, trusted: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Returns scikit-learn's handwritten digits with mean 0 and deviation 1: the trusted ones, or all others."""
    data = load_digits()
    is_wanted = (np.arange(len(data.target)) % TRUSTED_EVERY == 0) == trusted
    return ((data.images - data.images.mean()) / data.images.std())[is_wanted], data.target[is_wanted]


def _split(images: np.ndarray, labels: np.ndarray) -> tuple[Scans, Scans]:
    is_held_out = np.arange(len(labels)) % HELD_OUT_EVERY == 0
    return Scans(images[~is_held_out], labels[~is_held_out]), Scans(images[is_held_out], labels[is_held_out])
