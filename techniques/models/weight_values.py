"""Values of stored weights that are not finite: no step of training can repair them.

The header of a file does not tell. A dry run reads small models whole, and of large ones the ends of each tensor; what
loads a model checks all of its values.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ringmaster.techniques.models.model_folders import few, weight_bytes, weight_files

MAX_READ_BYTES = 256 << 20
"""The most that is read of weights before anything is started: some tenths of a second from a disk."""
SAMPLE_BYTES = 1 << 16  # of each end of a tensor of a large model
NUM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
REMEDY = "To fix: give weights that are finite, such as an earlier checkpoint or a fresh copy of the files"


def check_stored_values(folder: Path) -> None:
    """Raises ValueError where stored weights are not finite, as far as MAX_READ_BYTES of them show."""
    if faults := list(_faults(folder, is_whole=weight_bytes(folder) <= MAX_READ_BYTES)):
        raise ValueError(f"model: {few(faults)}. {REMEDY}")


def check_values(model: nn.Module, folder: Path) -> None:
    """Raises ValueError where a loaded model has weights that are not finite, with the tensor and the file."""
    lost = [name for name, parameter in model.named_parameters() if not _is_finite(parameter.detach())]
    if lost:
        faults = list(_faults(folder, is_whole=True)) or [f"{name} of {folder} is not finite" for name in lost]
        raise ValueError(f"model: {few(faults)}. {REMEDY}")


def _faults(folder: Path, *, is_whole: bool) -> Iterator[str]:
    num_bytes = 0
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                stored = file.get_slice(name)
                if stored.get_dtype() not in NUM_BYTES or (num_bytes > MAX_READ_BYTES and not is_whole):
                    continue
                for values in [file.get_tensor(name)] if is_whole else _ends(stored):
                    num_bytes += values.nbytes
                    if not _is_finite(values):
                        kind = "NaN" if bool(values.isnan().any()) else "infinity"
                        yield f"{name} in {path} holds {kind}"
                        break


def _ends(stored: Any) -> Iterator[Tensor]:
    """Yields the first and the last rows of a tensor."""
    shape = stored.get_shape()
    if not shape or 0 in shape:
        return
    row_bytes = NUM_BYTES[stored.get_dtype()]
    for size in shape[1:]:
        row_bytes *= size
    num_rows = min(max(SAMPLE_BYTES // row_bytes, 1), shape[0])
    yield stored[:num_rows]
    yield stored[shape[0] - num_rows :]


def _is_finite(values: Tensor) -> bool:
    if not values.is_floating_point() or values.is_meta or not values.numel():
        return True
    return all(bool(each.isfinite()) for each in torch.aminmax(values))  # without a mask as large as the values
