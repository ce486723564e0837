"""A trained model as others load it: config, safetensors and tokenizer, as `from_pretrained` expects them."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.techniques.engine.data.prepared import PreparedData
from ringmaster.techniques.engine.models.architectures import instantiate
from ringmaster.techniques.engine.models.build import WEIGHTS, no_progress_bar, skeleton
from ringmaster.techniques.engine.publish import publish
from ringmaster.techniques.job import ModelSpec
from ringmaster.techniques.values import to_json

FACTORY = "model.json"


def export_model(
    folder: Path, *, spec: ModelSpec, model: nn.Module, state: Mapping[str, Tensor], prepared: PreparedData
) -> None:
    """Writes `state` (full tensors under the model's own names; any device) to `folder`, aside and then renamed.

    A Hugging Face model becomes what its architecture's `from_pretrained` loads, with the tokenizer of its
    data where that has one; a factory's becomes `model.safetensors` with `model.json`, which names the
    factory. `model` is the
    one that was trained: its config is written; its weights, wherever they are, are not read.
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
    """`state` with one name for each tensor that the model has, as safetensors wants it; on the CPU."""
    first: dict[int, str] = {}
    kept: dict[str, Tensor] = {}
    for name, tensor in whole.state_dict(keep_vars=True).items():
        first.setdefault(id(tensor), name)
        if name in state:
            kept.setdefault(first[id(tensor)], state[name].detach().cpu().contiguous())
    missing = sorted(set(first.values()) - set(kept))
    assert not missing, f"the state lacks {missing[:3]}"
    return kept
