"""Export of a trained model in the format that `from_pretrained` loads: config, safetensors and tokenizer."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.techniques.interface.data_source import PreparedData
from ringmaster.techniques.interface.job import ModelSpec
from ringmaster.techniques.interface.values import to_json
from ringmaster.techniques.runtime.checkpoints.publish import publish
from ringmaster.techniques.runtime.models.architectures import instantiate
from ringmaster.techniques.runtime.models.build import WEIGHTS, no_progress_bar, skeleton

FACTORY = "model.json"


def export_model(
    folder: Path, *, spec: ModelSpec, model: nn.Module, state: Mapping[str, Tensor], prepared: PreparedData
) -> None:
    """Exports a model to `folder`, which is written aside and then renamed.

    A Hugging Face model is written as its architecture's `from_pretrained` loads it, with the tokenizer of its data if
    there is one. A factory's model is written as `model.safetensors`, with a `model.json` that names the factory.

    model: the trained model. Only its config is used; its weights are not read.
    state: full tensors under the model's own names, on any device.
    """
    with publish(folder) as aside:
        if spec.factory is not None:
            _save_factory(aside, spec, skeleton(spec, prepared), state)
        else:
            _save_pretrained(aside, model.config, state)
            if prepared.tokenizer_dir is not None:
                shutil.copytree(prepared.tokenizer_dir, aside, dirs_exist_ok=True)


def _save_pretrained(folder: Path, trained: Any, state: Mapping[str, Tensor]) -> None:
    config = copy.deepcopy(trained)
    if hasattr(config, "use_cache"):
        config.use_cache = True
    with torch.device("meta"):
        whole: Any = instantiate(config)
    with no_progress_bar():
        whole.save_pretrained(folder, state_dict=_untied(whole, state))


def _save_factory(folder: Path, spec: ModelSpec, whole: nn.Module, state: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(_untied(whole, state), folder / WEIGHTS, metadata={"format": "pt"})
    (folder / FACTORY).write_text(json.dumps({"factory": spec.factory, "kwargs": to_json(spec.kwargs)}, indent=1))


def _untied(whole: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` on the CPU with one name for each tensor, as safetensors requires: tied tensors appear once."""
    first: dict[int, str] = {}
    kept: dict[str, Tensor] = {}
    for name, tensor in whole.state_dict(keep_vars=True).items():
        first.setdefault(id(tensor), name)
        if name in state:
            kept.setdefault(first[id(tensor)], state[name].detach().cpu().contiguous())
    missing = sorted(set(first.values()) - set(kept))
    assert not missing, f"the state lacks {missing[:3]}"
    return kept
