"""Adapters in peft's format on disk, as described by adapter_config.json. Imports no torch.

    FOLDER/adapter_config.json           kind, rank, targets, ...
           adapter_model.safetensors     `base_model.model.<parameter>`, or `prompt_embeddings` of a prefix

Source: peft's docs/source/developer_guides/checkpoint.md.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ringmaster.techniques.checkpoints.checkpoint import publish
from ringmaster.techniques.job_features import JobFeature, base_changes
from ringmaster.techniques.job_specs import VIRTUAL_TOKENS, Adapter
from ringmaster.techniques.loss import compares
from ringmaster.techniques.models.model_folders import LOSS, REFERENCE, has_weights, metadata_of, read_json

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAMED = "base_model_name_or_path"
PARAMETER_PREFIX = "base_model.model."
PREFIX = "prompt_embeddings"  # the only tensor without `PARAMETER_PREFIX`
MAGNITUDE = ".lora_magnitude_vector"  # of a DoRA; its file has no `.weight` after it
OF_TRAINING = ("base_adapter", "dropout")
"""The fields of an adapter that its folder does not determine."""
KINDS = {"LORA": "lora", "PREFIX_TUNING": "prefix", "IA3": "ia3", "PROMPT_TUNING": "prompt"}
TASKS = {
    "CAUSAL_LM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "SEQ_2_SEQ_LM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "SEQ_CLS": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "TOKEN_CLS": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "QUESTION_ANS": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "FEATURE_EXTRACTION": "MODEL_MAPPING_NAMES",
}
"""peft's tasks, and transformers' tables of the classes that peft's AutoPeftModelFor... loads for them."""
HEADS = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
"""The modules that peft saves with every adapter of a task."""
# Config keys that change the adapted weights in ways not implemented here, with the values that have no effect.
FOREIGN: Mapping[str, Sequence[Any]] = {
    "bias": ("none", None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "exclude_modules": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "lora_bias": (False, None),
    "prefix_projection": (False, None),
    # PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA subtract a part of the base at initialization, and adapt the remainder.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "use_bdlora": (None, False),
    "use_qalora": (False, None),
}


def is_adapter(folder: Path) -> bool:
    """Returns whether a folder holds an adapter rather than a whole model."""
    return (folder / ADAPTER_CONFIG).is_file()


def read_adapter(folder: Path) -> Adapter:
    """Returns the adapter in a folder, for further training. Raises ValueError where it is missing or unsupported."""
    try:
        return _adapter_of(read_config(folder), folder)
    except (KeyError, TypeError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else f"has a value of another kind: {error}"
        raise ValueError(f"adapter: {folder / ADAPTER_CONFIG} {reason}. To fix: save the adapter again") from error


def _adapter_of(config: Mapping[str, Any], folder: Path) -> Adapter:
    kind = KINDS.get(str(config.get("peft_type")))
    if kind is None:
        there = ", ".join(KINDS)
        raise ValueError(f"adapter: {folder} holds a {config.get('peft_type')}. To fix: give one of {there}")
    for key, harmless in FOREIGN.items():
        if config.get(key) not in harmless:
            raise ValueError(
                f"adapter: {folder} has {key}: {json.dumps(config[key])}, which is not known here. "
                "To fix: give a plain LoRA, prefix or (IA)3"
            )
    targets = config.get("target_modules") or []
    if isinstance(targets, str) and targets != "all-linear":
        raise ValueError(
            f"adapter: {folder} names its targets by an expression, {targets!r}. To fix: save it with a list of names"
        )
    common: dict[str, Any] = {
        "kind": kind,
        "modules_to_save": tuple(sorted(config.get("modules_to_save") or ())),
        "from_pretrained": str(folder),
    }
    if kind in VIRTUAL_TOKENS:
        return Adapter(num_virtual_tokens=config["num_virtual_tokens"], **common)
    common["targets"] = () if isinstance(targets, str) else tuple(sorted(targets))
    if kind == "ia3":
        return Adapter(feedforward=tuple(sorted(config.get("feedforward_modules") or ())), **common)
    stabilised = bool(config.get("use_rslora", False))
    dora = bool(config.get("use_dora", False))
    return Adapter(rank=config["r"], alpha=float(config["lora_alpha"]), rank_stabilised=stabilised, dora=dora, **common)


def resolved(adapter: Adapter) -> Adapter:
    """Returns the adapter with all fields from the folder that it continues from.

    Raises ValueError where a given field contradicts the folder.
    """
    if adapter.from_pretrained is None:
        return adapter
    result = read_adapter(Path(adapter.from_pretrained))
    for field in fields(Adapter):
        if field.name in OF_TRAINING:
            continue
        given, there = getattr(adapter, field.name), getattr(result, field.name)
        as_set = (sorted(given), sorted(there)) if isinstance(given, tuple) else (given, there)
        if given != field.default and as_set[0] != as_set[1]:
            raise ValueError(
                f"adapter: {field.name} is {given!r}, and the adapter in {adapter.from_pretrained} has {there!r}. "
                f"To fix: leave {field.name} out"
            )
    return replace(result, **{name: getattr(adapter, name) for name in OF_TRAINING})


def initial_adapter(adapter: Adapter | None, weights: Path | None) -> tuple[Adapter | None, Path | None]:
    """Returns the adapter that a job's training begins with, and the folder of the weights that it is on.

    weights: the folder of the job's base, which holds an adapter where the job's own continues it.
    """
    if adapter is None or not adapter.continues_base or weights is None or not is_adapter(weights):
        return adapter, weights
    return resolved(replace(adapter, from_pretrained=str(weights), base_adapter=None)), base_of(weights)


def read_config(folder: Path) -> Mapping[str, Any]:
    """Returns the content of the folder's adapter_config.json.

    Raises ValueError where it is missing or invalid, or where there are no weights next to it.
    """
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
    except OSError as error:
        raise ValueError(
            f"adapter: {folder} has no {ADAPTER_CONFIG}. To fix: give a folder that peft or we have saved"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"adapter: {folder / ADAPTER_CONFIG} is not JSON: {error}. To fix: save the adapter again"
        ) from error
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ValueError(f"adapter: {folder} has no {ADAPTER_WEIGHTS}. To fix: save the adapter as safetensors")
    if not isinstance(config, Mapping):
        raise ValueError(f"adapter: {folder / ADAPTER_CONFIG} is not a JSON object. To fix: save the adapter again")
    return config


def base_of(folder: Path) -> Path | None:
    """Returns the folder with the base weights of the adapter in `folder`; None where these are on the hub.

    Raises ValueError where the config does not name the base, or where the base's folder no longer exists.
    """
    config = read_config(folder).get(NAMED)
    if not config:
        raise ValueError(
            f"adapter: {folder} does not name its base model. To fix: write base_model_name_or_path into its "
            "adapter_config.json"
        )
    path = Path(config)
    if path.is_absolute() and not has_weights(path):
        raise ValueError(
            f"adapter: the base of {folder}, {path}, is not there. To fix: bring it back; of a registered model, "
            "`ringmaster lineage restore` writes one"
        )
    return path if path.is_dir() else None


def base_name(folder: Path) -> str:
    """Returns the folder, or the name on the hub, of the base of the adapter in `folder`; raises as `base_of`."""
    return str(base_of(folder) or read_config(folder)[NAMED])


def config_of(
    adapter: Adapter,
    *,
    model: Any,
    base: str | None,
    targets: Sequence[str],
    feedforward: Sequence[str],
    saved: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the content of adapter_config.json for an adapter of `model`.

    base: the folder or hub name with the model's own weights; None where these are drawn from a seed.
    targets, feedforward: the modules that it adapts, by suffixes that match no other module.
    saved: the whole names of the modules that it trains directly.
    """
    model_config: Any = getattr(model, "config", None)
    name = type(model).__name__
    modules = [path for path, _ in model.named_modules()]
    task = _task_of(model)
    if not {path for path in modules if path.endswith(HEADS.get(task or "", ()))} <= set(saved):
        task = None  # peft would look for the heads' weights in the adapter
    config: dict[str, Any] = {
        "peft_type": {kind: theirs for theirs, kind in KINDS.items()}[adapter.kind],
        "task_type": task,
        NAMED: base,
        "inference_mode": True,
        "modules_to_save": _ends(adapter.modules_to_save, saved, modules) or None,
    }
    if task is None:
        config["auto_mapping"] = {"base_model_class": name, "parent_library": type(model).__module__}
    if adapter.kind in VIRTUAL_TOKENS:
        del config["modules_to_save"]
        heads = kv_shape(model_config)
        width = heads[0] * heads[1] if adapter.kind == "prefix" else model_config.hidden_size
        config |= {
            "num_virtual_tokens": adapter.num_virtual_tokens,
            "num_layers": model_config.num_hidden_layers,
            "num_attention_heads": heads[0],
            "token_dim": width,
            "num_transformer_submodules": 1,
        }
        if adapter.kind == "prompt":
            return config
        return config | {"encoder_hidden_size": width, "prefix_projection": False}
    config |= {"target_modules": list(targets), "fan_in_fan_out": getattr(model_config, "model_type", None) == "gpt2"}
    if adapter.kind == "ia3":
        return config | {"feedforward_modules": list(feedforward), "init_ia3_weights": True}
    alpha = int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha
    return config | {
        "r": adapter.rank,
        "lora_alpha": alpha,
        "use_rslora": adapter.rank_stabilised,
        "lora_dropout": adapter.dropout,
        "use_dora": adapter.dora,
        "bias": "none",
        "init_lora_weights": True,
    }


def _task_of(model: Any) -> str | None:
    """Returns peft's task for a model of tokens; None where it has none."""
    from transformers.models.auto import modeling_auto

    if getattr(model, "main_input_name", None) != "input_ids":
        return None
    for task, table in TASKS.items():
        listed = getattr(modeling_auto, table).values()
        if any(type(model).__name__ in (names if isinstance(names, tuple) else (names,)) for names in listed):
            return task
    return None


def _ends(given: Sequence[str], saved: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Returns names of the saved modules for peft, which matches every module name with such an ending.

    An ending matches even within a word.
    """
    fitted = {path for path in modules if path.endswith(tuple(given))}
    return list(given) if fitted == set(saved) else sorted(saved)


def kv_shape(config: Any) -> tuple[int, int]:
    """Returns (heads of keys and values, numbers of each head) of a Hugging Face decoder."""
    num_heads: int = config.num_attention_heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return getattr(config, "num_key_value_heads", None) or num_heads, head_dim


def tensor_name(parameter: str) -> str:
    """Returns the name of a parameter in the adapter's file."""
    return parameter if parameter == PREFIX else PARAMETER_PREFIX + parameter.replace(f"{MAGNITUDE}.weight", MAGNITUDE)


def parameter_name(tensor: str) -> str:
    """Returns the parameter's name of a tensor in the adapter's file."""
    name = tensor.removeprefix(PARAMETER_PREFIX)
    return f"{name}.weight" if name.endswith(MAGNITUDE) else name


FORMAT = {"format": "pt"}
"""The metadata of the file of any adapter's weights."""


def base_changes_of(folder: Path) -> tuple[JobFeature, ...]:
    """Returns what changed the weights below an adapter when Ringmaster trained it."""
    metadata = metadata_of(folder / ADAPTER_WEIGHTS)
    return base_changes({key: text for key, text in metadata.items() if key not in FORMAT})


def has_lost_base(folder: Path) -> bool:
    """Returns whether a folder holds an adapter on a base in a folder that no longer exists, or has no weights.

    The same of a whole model whose loss compares it with the weights that it began with, where these are lost or, of an
    earlier release, not named.
    """
    if is_adapter(folder):
        named = read_config(folder).get(NAMED)
        return isinstance(named, str) and _is_lost(named)
    loss = read_json(folder / LOSS)
    if not loss or loss.get(REFERENCE, folder) is None:
        return False
    return compares(loss["loss"], loss["loss_options"]) and reference_of(folder) is None


def reference_of(*folders: Path) -> str | None:
    """Returns the folder or hub name of the weights that a loss compares models with; None where they are not there.

    folders: of models; the first that names them decides, an adapter without a teacher by its base.
    """
    names = (
        read_json(f / LOSS).get(REFERENCE) or (read_config(f).get(NAMED) if is_adapter(f) else None) for f in folders
    )
    name = next((name for name in names if name), None)
    return None if name is None or _is_lost(name) else str(name)


def _is_lost(name: str) -> bool:
    return Path(name).is_absolute() and not has_weights(Path(name))


def on_base(folder: Path, base: Path, *, copy: Path) -> Path:
    """Returns a copy of an adapter that names `base`, a folder; an existing copy whose base exists is reused.

    Of a whole model, a folder of links to its files, and the file of its loss that names `base` as its reference.
    """
    if copy.is_dir() and all(file.exists() for file in copy.iterdir()) and not has_lost_base(copy):
        return copy
    key, file = (NAMED, ADAPTER_CONFIG) if is_adapter(folder) else (REFERENCE, LOSS)
    copy.parent.mkdir(parents=True, exist_ok=True)
    with publish(copy) as aside:
        how = shutil.copy2 if is_adapter(folder) else os.symlink
        shutil.copytree(folder.absolute(), aside, dirs_exist_ok=True, copy_function=how)
        config = {**read_json(folder / file), key: str(base.absolute())}
        (aside / file).unlink()  # the copied file may be read-only
        (aside / file).write_text(json.dumps(config, indent=2, sort_keys=True))
    return copy
