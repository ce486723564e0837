"""Folders of models and adapters for Ollama.

    FOLDER/Modelfile, adapter.gguf[, base.gguf]                an adapter, and its base
    FOLDER/Modelfile, model.gguf                               a whole model

A GGUF adapter has the two matrices of each module as `blk.0.attn_q.weight.lora_a` and `.lora_b`; an engine multiplies
their product by alpha over the rank. The rows of the second one are those of the module's weights: of a Llama's queries
and keys they are interleaved in the same way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open

from ringmaster.errors import InputError, input_errors, raise_faults
from ringmaster.features.foreign_models.engine_checks import OLLAMA, checked_adapter
from ringmaster.features.foreign_models.gguf_file import write_model, write_tensors
from ringmaster.features.foreign_models.gguf_layout import GgufLayout, config_of
from ringmaster.model_lineage.base_models import fetch_from_hub
from ringmaster.techniques.checkpoints.checkpoint import publish
from ringmaster.techniques.checkpoints.tensor_files import LazyTensor
from ringmaster.techniques.models import peft_format
from ringmaster.techniques.models.model_folders import CONFIG, read_json

MODELFILE, ADAPTER, BASE, MODEL = "Modelfile", "adapter.gguf", "base.gguf", "model.gguf"
HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


def write_ollama(source: Path, folder: Path, *, base: str | None) -> None:
    """Writes an adapter, or a whole model, for Ollama. Raises InputError with all that Ollama or GGUF refuses.

    base: the name in Ollama of the model that an adapter is on; None writes this model too.
    """
    if base is not None and not re.fullmatch(r"[\w./:-]+", base):
        raise InputError([f"--base: {base!r} is no name of a model in Ollama. To fix: write one such as llama3.2:1b"])
    if not peft_format.is_adapter(source):
        if base is not None:
            raise InputError(["--base is of an adapter, and this is a whole model. To fix: leave out --base"])
        with publish(folder) as aside:
            write_model(str(source), aside / MODEL)
            (aside / MODELFILE).write_text(f"FROM ./{MODEL}\n")
        return
    of_base = _base_folder(source, with_weights=base is None)
    fields = read_json(of_base / CONFIG)
    config = checked_adapter(source, engine=OLLAMA, model_type=str(fields.get("model_type", "")))
    layout = GgufLayout.of(config_of(fields))
    with publish(folder) as aside:
        write_adapter(source, aside / ADAPTER, config=config, layout=layout)
        if base is None:
            write_model(str(of_base), aside / BASE)
        (aside / MODELFILE).write_text(f"FROM {base or f'./{BASE}'}\nADAPTER ./{ADAPTER}\n")


def write_adapter(source: Path, file: Path, *, config: Mapping[str, Any], layout: GgufLayout) -> None:
    """Writes a LoRA as a GGUF file of float32. Raises InputError where it adapts what the layout has no name for."""
    tensors: dict[str, LazyTensor] = {}
    unknown = []
    with safe_open(source / peft_format.ADAPTER_WEIGHTS, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            module, _, side = peft_format.parameter_name(name).removesuffix(".weight").rpartition(".lora_")
            if f"{module}.weight" not in layout.shapes:
                unknown.append(module)
                continue
            values = opened.get_tensor(name)
            values = layout.stored(f"{module}.weight", values) if side == "B" else values
            tensors[f"{layout.name(f'{module}.weight')}.lora_{side.lower()}"] = LazyTensor(
                dtype=torch.float32, shape=tuple(values.shape), load=partial(_same, values)
            )
    raise_faults([f"{source}: GGUF has no name for {module}. To fix: export it merged" for module in unknown[:1]])
    scale = math.sqrt(config["r"]) if config.get("use_rslora") else 1.0  # engines divide by the rank, not by its root
    writer = gguf.GGUFWriter(None, layout.architecture.name)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(config["lora_alpha"]) * scale)
    writer.add_name(file.stem)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    write_tensors(writer, file, tensors, dict.fromkeys(tensors, gguf.GGMLQuantizationType.F32))


def _same(values: torch.Tensor) -> torch.Tensor:
    return values


def _base_folder(source: Path, *, with_weights: bool) -> Path:
    """Returns the folder with the base of an adapter, or at least with its config, fetched where the hub has it."""
    if (base := peft_format.base_of(source)) is not None:
        return base
    with input_errors(OSError, about=f"the base of {source}: "):
        return fetch_from_hub(peft_format.base_name(source), HUB_FILES if with_weights else (CONFIG,))
