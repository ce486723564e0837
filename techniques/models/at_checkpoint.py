"""Export of a model at one of its training checkpoints, in the files of the finished model."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open

from ringmaster.techniques.models.adapters.peft_format import parameter_name
from ringmaster.techniques.runtime.checkpoints.checkpoint import CheckpointStore
from ringmaster.techniques.runtime.checkpoints.publish import publish
from ringmaster.techniques.runtime.checkpoints.state import Reader
from ringmaster.techniques.runtime.checkpoints.storage import LocalPlace, place_of
from ringmaster.techniques.runtime.checkpoints.tensor_files import DTYPES, LazyTensor, blocks_of

WEIGHTS = ".safetensors"


def checkpoint_steps(root: str) -> dict[int, str]:
    """The names of the checkpoints under a folder or URL, by step; empty if the location does not exist."""
    try:
        names = place_of(root).names()
    except OSError:
        return {}
    return {int(name.partition("-")[2]): name for name in names}


def export_checkpoint(root: str, name: str, *, finished: Path, folder: Path) -> None:
    """Writes the model of checkpoint `name` under `root` to a new folder.

    finished: the folder of the model that the training ended with. All files but the weights are copied from it, and
        its weights' files determine the names and dtypes of the tensors.
    Raises ValueError if the checkpoint is incomplete or belongs to another model.
    """
    checkpoint = CheckpointStore(root).whole(name)
    if checkpoint is None:
        raise ValueError(f"checkpoint {name} under {root} is not whole")
    stored = checkpoint.manifest.tensors
    with Reader(checkpoint) as reader, publish(folder) as aside:
        for file in sorted(path for path in finished.rglob("*") if path.is_file()):
            path = file.relative_to(finished)
            if file.suffix != WEIGHTS:
                (aside / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, aside / path)
                continue
            tensors = {}
            for tensor, dtype in _dtypes(file).items():
                name_here = f"model/{parameter_name(tensor)}"
                if name_here not in stored:
                    raise ValueError(f"checkpoint {name} under {root} has no {tensor}: it is of another model")
                shape = stored[name_here].shape
                load = partial(_read, reader, name_here, dtype)
                tensors[tensor] = LazyTensor(dtype=dtype, shape=shape, load=load)
            LocalPlace(aside).write(path.as_posix(), blocks_of(tensors, metadata={"format": "pt"}))


def _read(reader: Reader, name: str, dtype: torch.dtype) -> torch.Tensor:
    return reader.whole(name).to(dtype)


def _dtypes(file: Path) -> dict[str, torch.dtype]:
    with safe_open(file, framework="pt") as opened:
        return {name: DTYPES[opened.get_slice(name).get_dtype()] for name in opened.keys()}  # noqa: SIM118
