"""Export of a trained adapter in peft's format: its config, its tensors, and the tokenizer of its data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ringmaster.techniques.data import PreparedData
from ringmaster.techniques.interface.job import Adapter, ModelSpec
from ringmaster.techniques.models.adapters.attaching import saved_modules, sites, unambiguous_targets
from ringmaster.techniques.models.adapters.peft_format import CONFIG, WEIGHTS, config_of, resolved, tensor_name
from ringmaster.techniques.models.build import skeleton
from ringmaster.techniques.models.export import copy_processors
from ringmaster.techniques.runtime.checkpoints.publish import publish


def export_adapter(
    folder: Path,
    *,
    adapter: Adapter,
    spec: ModelSpec,
    base: str | None,
    state: Mapping[str, Tensor],
    prepared: PreparedData,
) -> None:
    """Writes an adapter to `folder`: first to a temporary folder, which is then renamed.

    spec: the model that the adapter is on.
    base: the folder or hub name with that model's weights, if any.
    state: the adapter's whole tensors, under the model's names.
    """
    from safetensors.torch import save_file

    model, adapter = skeleton(spec, prepared), resolved(adapter)
    at = sites(model, adapter)
    targets, feedforward = unambiguous_targets(model, at)
    said = config_of(
        adapter,
        model=model,
        base=base,
        targets=targets,
        feedforward=feedforward,
        saved=saved_modules(model, adapter),
    )
    tensors = {tensor_name(name): value.detach().cpu().contiguous() for name, value in state.items()}
    with publish(folder) as aside:
        (aside / CONFIG).write_text(json.dumps(said, indent=2, sort_keys=True))
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        copy_processors(aside, prepared=prepared, base=base)
