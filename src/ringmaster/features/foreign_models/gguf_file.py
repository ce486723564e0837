"""A model as one GGUF file, which llama.cpp, Ollama, LM Studio and transformers read.

Everything is checked before the file is begun. It is written aside, synced and renamed; one tensor at a time is in
memory.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from ringmaster.errors import InputError, raise_faults
from ringmaster.features.foreign_models import GgufType
from ringmaster.features.foreign_models.conversion import open_model
from ringmaster.features.foreign_models.foreign_checkpoints import LazyModel
from ringmaster.features.foreign_models.gguf_layout import HEAD, GgufLayout, config_of
from ringmaster.features.foreign_models.gguf_tokenizer import GgufTokenizer
from ringmaster.files import check_new
from ringmaster.techniques.checkpoints.storage import sync_path
from ringmaster.techniques.checkpoints.tensor_files import LazyTensor
from ringmaster.techniques.models.model_folders import QUANTIZATION
from ringmaster.techniques.models.peft_format import is_adapter

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """What was written. num_unquantized: the matrices that are f16, as their rows are no whole blocks."""

    file: str
    architecture: str
    type: GgufType
    num_tensors: int
    num_bytes: int
    num_unquantized: int


def write_model(source: str, file: Path, *, type: GgufType | None = None) -> GgufFile:
    """Writes the model in `source`, which is anything that `open_model` opens, as a new GGUF file.

    type: None means bf16 for a model in bf16, and f16 for others.
    Raises InputError, with all faults of a kind, where the format cannot hold the model, or the file exists.
    """
    check_new(file, kind="file")
    if is_adapter(Path(source)):
        merge = f"ringmaster export {source} FOLDER --merge"
        raise InputError(
            [f"{source} is an adapter, without the weights of its base. To fix: merge it first, by {merge}"]
        )
    model = open_model(source)
    if model.config.get("quantization_config") or model.config.get(QUANTIZATION):
        raise InputError([f"{source} is quantized already. To fix: convert the model that it was quantized from"])
    layout = GgufLayout.of(config_of(model.config))
    odd = [name for name, tensor in model.tensors.items() if tensor.dtype not in FLOATS]
    faults = [f"{odd[0]} is of {model.tensors[odd[0]].dtype}. To fix: give a model of floats"] if odd else []
    faults += layout.tensor_faults({name: tensor.shape for name, tensor in model.tensors.items()})
    raise_faults([f"{source}: {fault}" for fault in faults])
    tokenizer = GgufTokenizer.read(model.tokenizer, num_embeddings=layout.config.vocab_size)
    if type is None:
        is_bf16 = any(tensor.dtype == torch.bfloat16 for tensor in model.tensors.values())
        type = GgufType.bf16 if is_bf16 else GgufType.f16
    writer = gguf.GGUFWriter(None, layout.architecture.name)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(file.stem)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{type.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    layout.describe(writer)
    tokenizer.describe(writer, num_embeddings=layout.config.vocab_size)
    return _write(writer, file, tensors=_tensors(model, layout), layout=layout, type=type)


def write_tensors(
    writer: gguf.GGUFWriter,
    file: Path,
    tensors: Mapping[str, LazyTensor],
    types: Mapping[str, gguf.GGMLQuantizationType],
) -> None:
    """Writes a file of metadata and tensors, which gets its name when it is complete. Raises OSError, ValueError.

    tensors: under GGUF's names, which are loaded one by one. types: of the tensors, by name.
    """
    for name, tensor in tensors.items():
        shape = gguf.quant_shape_to_byte_shape(tensor.shape, types[name])
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), int(np.prod(shape)), raw_dtype=types[name])
    file.parent.mkdir(parents=True, exist_ok=True)
    needed = sum(info.nbytes for part in writer.tensors for info in part.values())
    if (free := shutil.disk_usage(file.parent).free) < needed:
        raise OSError(errno.ENOSPC, f"{needed / 1e9:.1f} GB are needed, and {free / 1e9:.1f} GB free", str(file.parent))
    with TemporaryDirectory(dir=file.parent, prefix=f".{file.name}-") as aside:
        place = Path(aside, file.name)
        try:
            writer.write_header_to_file(place)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, tensor in tensors.items():
                writer.write_tensor_data(_bytes_of(name, tensor.load(), types[name]))
        except OSError as error:
            if error.errno is not None:
                raise
            raise OSError(errno.ENOSPC, str(error), str(file)) from error  # numpy's, of a write that was cut short
        finally:
            writer.close()
        sync_path(place)
        place.rename(file)
    sync_path(file.parent)


def _write(
    writer: gguf.GGUFWriter, file: Path, *, tensors: Mapping[str, LazyTensor], layout: GgufLayout, type: GgufType
) -> GgufFile:
    types = {name: _type_of(tensor.shape, type) for name, tensor in tensors.items()}
    write_tensors(writer, file, tensors, types)
    return GgufFile(
        file=str(file),
        architecture=layout.architecture.name,
        type=type,
        num_tensors=len(tensors),
        num_bytes=file.stat().st_size,
        num_unquantized=sum(len(tensors[name].shape) > 1 and types[name] != _in_ggml(type) for name in tensors),
    )


def _type_of(shape: tuple[int, ...], type: GgufType) -> gguf.GGMLQuantizationType:
    if len(shape) < 2:
        return gguf.GGMLQuantizationType.F32
    block_size, _ = gguf.GGML_QUANT_SIZES[_in_ggml(type)]
    return _in_ggml(type) if shape[-1] % block_size == 0 else gguf.GGMLQuantizationType.F16


def _in_ggml(type: GgufType) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[type.upper()]


def _tensors(model: LazyModel, layout: GgufLayout) -> dict[str, LazyTensor]:
    """Returns the tensors of a model under the names, and in the layout, of GGUF."""
    result = {
        layout.name(name): LazyTensor(
            dtype=torch.float32, shape=tensor.shape, load=partial(_stored, layout, name, tensor)
        )
        for name, tensor in model.tensors.items()
        if name in layout.shapes or name != f"{HEAD}.weight"  # a copy of the embeddings
    }
    for name, values in layout.extra_tensors().items():
        result[name] = LazyTensor(dtype=torch.float32, shape=tuple(values.shape), load=values.clone)
    return result


def _stored(layout: GgufLayout, name: str, tensor: LazyTensor) -> Tensor:
    return layout.stored(name, tensor.load())


def _bytes_of(name: str, values: Tensor, type: gguf.GGMLQuantizationType) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns values rounded to a type. Raises ValueError where they are too large for it."""
    plain = np.ascontiguousarray(values.detach().cpu().float().numpy())
    worst = float(np.abs(plain).max(initial=0.0)) if type == gguf.GGMLQuantizationType.F16 else 0.0
    if worst > float(np.finfo(np.float16).max):
        raise ValueError(f"{name} has a value of {worst:.3g}, which f16 cannot hold. To fix: write it as bf16")
    return np.ascontiguousarray(gguf.quantize(plain, type)).view(np.uint8)
