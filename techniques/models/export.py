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

from ringmaster.codec import to_json
from ringmaster.techniques.data.row_samples.tokenizer import turn_end_of
from ringmaster.techniques.interface.data_source import PreparedData
from ringmaster.techniques.interface.job import ModelSpec
from ringmaster.techniques.models.adaptations.folders import WEIGHTS
from ringmaster.techniques.models.architectures import instantiate
from ringmaster.techniques.models.build import no_progress_bar, skeleton
from ringmaster.techniques.runtime.checkpoints.publish import publish

FACTORY = "model.json"
GENERATION = "generation_config.json"
PROCESSOR_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece*",
    "chat_template*",
    "*processor_config.json",
)
"""Patterns of the files of tokenizers and of image processors."""


def export_model(
    folder: Path,
    *,
    spec: ModelSpec,
    model: nn.Module,
    state: Mapping[str, Tensor],
    prepared: PreparedData,
    base: str | None = None,
) -> None:
    """Exports a model to `folder`, which is written aside and then renamed.

    A Hugging Face model is written as its architecture's `from_pretrained` loads it, with the tokenizer or the image
    processor of its data or, where the data has none, of its base. A factory's model is written as `model.safetensors`,
    with a `model.json` that names the factory.

    How it generates is kept as well: its `generation_config`, with the token that ends a turn of a chat template of the
    data's among those that end a text.

    model: the trained model. Only its configs are used; its weights are not read.
    state: full tensors under the model's own names, on any device.
    base: the folder or hub name whose weights the training began with.
    """
    with publish(folder) as aside:
        if spec.factory is not None:
            _save_factory(aside, spec, skeleton(spec, prepared), state)
        else:
            _save_pretrained(aside, model.config, state)
            _save_generation(aside, model, prepared)
            copy_processors(aside, prepared=prepared, base=base)


def copy_processors(folder: Path, *, prepared: PreparedData, base: str | None) -> None:
    """Copies the files that turn text or images into a model's inputs: those of its data, else those of its base."""
    own = [each for each in (prepared.tokenizer_dir, prepared.processor_dir) if each is not None]
    for each in own:
        shutil.copytree(each, folder, dirs_exist_ok=True)
    if own or base is None:
        return
    source = Path(base)
    if not source.is_dir():
        from huggingface_hub import snapshot_download

        # The base itself was loaded from the hub, so that this is in its cache, or can be.
        source = Path(snapshot_download(base, allow_patterns=list(PROCESSOR_FILES)))
    for pattern in PROCESSOR_FILES:
        for file in sorted(source.glob(pattern)):
            shutil.copyfile(file, folder / file.name)


def _save_pretrained(folder: Path, trained: Any, state: Mapping[str, Tensor]) -> None:
    config = copy.deepcopy(trained)
    if hasattr(config, "use_cache"):
        config.use_cache = True
    with torch.device("meta"):
        whole: Any = instantiate(config)
    with no_progress_bar():
        whole.save_pretrained(folder, state_dict=_untied(whole, state))


def _save_generation(folder: Path, model: Any, prepared: PreparedData) -> None:
    """Writes how the trained model generates, in place of what transformers makes of its config."""
    file, trained = folder / GENERATION, getattr(model, "generation_config", None)
    if trained is None or not file.is_file():  # it does not generate
        return
    config = copy.deepcopy(trained)
    of_turn = None if prepared.tokenizer_dir is None else turn_end_of(prepared.tokenizer_dir)
    if of_turn is not None:
        named = config.eos_token_id
        ends = [] if named is None else list(named) if isinstance(named, (list, tuple)) else [named]
        config.eos_token_id = list(dict.fromkeys([*ends, of_turn]))
    # Not `save_pretrained`, which refuses settings that many models of the hub have, such as a temperature for nothing.
    config.to_json_file(file)


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
