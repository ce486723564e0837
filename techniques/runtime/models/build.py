"""Building of models on the CPU in fp32, with weights that depend on the seed alone or are read from safetensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringmaster.techniques.adaptations.folders import quantization_of
from ringmaster.techniques.adaptations.quantizing import load_quantized
from ringmaster.techniques.adapters.peft_format import base_of, is_adapter
from ringmaster.techniques.interface.attention import IMPLEMENTATIONS, check_attention
from ringmaster.techniques.interface.data_source import PreparedData
from ringmaster.techniques.interface.dotted_names import resolve
from ringmaster.techniques.interface.job import Adapter, ModelSpec
from ringmaster.techniques.runtime.data.encoding.vocabularies import have_other_tokens
from ringmaster.techniques.runtime.models.architectures import (
    architecture,
    check_labels,
    fresh_config,
    instantiate,
    pretrained_config,
)

WEIGHTS = "model.safetensors"
MAX_NAMED = 3


def build_model(spec: ModelSpec, *, data: PreparedData, seed: int, weights_from: Path | None = None) -> nn.Module:
    """The model of `spec`, on the CPU, in fp32, in train mode.

    Equal (spec, data, seed) give equal weights in every process. The state of torch's global random number generator
    is restored.

    weights_from: a folder with safetensors (written by `export_model` or `save_pretrained`) that replace all initial
        weights. If the folder holds an adapter, these are the weights of its base with the adapter merged into them.
    Raises ValueError with a remedy if the weights do not fit, or if `spec` is invalid.
    """
    check_model(spec)
    if weights_from is not None and is_adapter(weights_from):
        return _merged(spec, data, seed, weights_from)
    quantized = weights_from or (Path(spec.from_pretrained) if spec.from_pretrained is not None else None)
    how = None if quantized is None else quantization_of(quantized)
    with seeded(seed):
        if quantized is not None and how is not None:
            _check_vocabulary(quantized, data)
            model = load_quantized(_fresh(spec, data), quantized, how)
        elif spec.factory is not None:
            model = _from_factory(spec)
            if weights_from is not None:
                _load_weights(model, weights_from)
        else:
            config = model_config(spec, data)
            if weights_from is not None:
                _check_vocabulary(weights_from, data)
                _check_labels(weights_from, data)
            elif spec.from_pretrained is not None:
                _check_vocabulary(Path(spec.from_pretrained), data)
            model = _from_config(spec, config, weights_from=weights_from)
    return model.float().train()


def _merged(spec: ModelSpec, data: PreparedData, seed: int, folder: Path) -> nn.Module:
    """The base model of an adapter, with the adapter merged into its weights."""
    from ringmaster.techniques.adapters.attaching import attach
    from ringmaster.techniques.adapters.merging import merge

    _check_vocabulary(folder, data)
    model = build_model(spec, data=data, seed=seed, weights_from=base_of(folder))
    return merge(attach(model, Adapter(from_pretrained=str(folder)), seed=seed))


def _fresh(spec: ModelSpec, data: PreparedData) -> nn.Module:
    """The model with fresh weights, from a factory or a config."""
    if spec.factory is not None:
        return _from_factory(spec)
    config = model_config(spec, data)
    if hasattr(config, "quantization_config"):  # read by `load_quantized`, not by transformers
        del config.quantization_config
    return instantiate(config)


def check_model(spec: ModelSpec) -> None:
    """Raises ValueError if `spec` is inconsistent, without building or loading anything."""
    if spec.command is not None:
        raise ValueError("model: a command's model is known to the command alone. To fix: evaluate it there")
    given = [name for name in ("architecture", "from_pretrained", "factory") if getattr(spec, name) is not None]
    if not given or ("factory" in given and len(given) > 1):
        said = " and ".join(given) or "none"
        raise ValueError(f"model: {said} given. To fix: give architecture, from_pretrained or both, or a factory")
    if spec.factory is not None and spec.config:
        raise ValueError("model: a factory takes no config. To fix: give kwargs")
    if spec.factory is None and spec.kwargs:
        raise ValueError("model: kwargs are a factory's. To fix: give config")
    check_attention(spec)


def model_config(spec: ModelSpec, data: PreparedData) -> Any:
    """The Hugging Face config of a model that does not come from a factory."""
    config = pretrained_config(spec, data) if spec.from_pretrained is not None else fresh_config(spec, data)
    if spec.attention != "auto":
        config._attn_implementation = IMPLEMENTATIONS[spec.attention]
    return config


def skeleton(spec: ModelSpec, data: PreparedData) -> nn.Module:
    """The model without weights (on the meta device), in train mode; with weights if its factory needs real values."""
    check_model(spec)
    if spec.factory is None:
        config = model_config(spec, data)
        with torch.device("meta"):
            return instantiate(config).train()
    with seeded(0):
        try:
            with torch.device("meta"):
                return _from_factory(spec).train()
        except RuntimeError:  # the factory reads values, which meta tensors do not have
            return _from_factory(spec).train()


def _from_config(spec: ModelSpec, config: Any, *, weights_from: Path | None) -> nn.Module:
    cls = architecture(config.architectures[0])
    if weights_from is not None:
        model, fault = _load_pretrained(cls, str(weights_from), config, exact=True)
        if fault:
            raise ValueError(
                f"model: the base in {weights_from} does not fit {cls.__name__}: {fault}. "
                f"To fix: give both models the same config and data"
            )
        return model
    if spec.from_pretrained is None:
        return instantiate(config)
    model, fault = _load_pretrained(cls, spec.from_pretrained, config, fresh_head=spec.has_fresh_head)
    if fault:
        raise ValueError(
            f"model: the weights of {spec.from_pretrained!r} do not fit {cls.__name__}: {fault}. To fix: take back "
            f"what model.config changes; for a fresh head, set num_labels or architectures there"
        )
    return model


def _load_pretrained(
    cls: Any, name: str, config: Any, *, exact: bool = False, fresh_head: bool = False
) -> tuple[nn.Module, str]:
    """The model, and a message with the tensors that its file lacks or has in another shape; empty if it fits.

    exact: tensors of the file that the model does not have are faults too.
    fresh_head: tensors outside of the base model, and of its pooler, may be missing or have another shape; they stay
        fresh.
    """
    try:
        with no_progress_bar():
            model, info = cls.from_pretrained(
                name, config=config, dtype=torch.float32, use_safetensors=True, trust_remote_code=False,
                local_files_only=Path(name).is_dir(), ignore_mismatched_sizes=True, output_loading_info=True,
            )  # fmt: skip
    except OSError as error:
        raise ValueError(
            f"model: {name!r} cannot be loaded: {' '.join(str(error).split())}. To fix: give a folder or hub model "
            f"with safetensors weights (pickled ones are never loaded)"
        ) from error
    body = f"{cls.base_model_prefix}."
    wrong = [f"{key} is missing" for key in sorted(info["missing_keys"])]
    wrong += [f"{key} is {list(a)}, not {list(b)}" for key, a, b in sorted(info["mismatched_keys"])]
    # A body that was saved with another head may lack the pooler, which the head reads.
    wrong = [fault for fault in wrong if not fresh_head or (fault.startswith(body) and ".pooler." not in fault)]
    if exact:
        wrong += [f"{key} has no place" for key in sorted(info["unexpected_keys"])]
    return model, _some(wrong)


def _check_vocabulary(base: Path, data: PreparedData) -> None:
    """Raises ValueError if the base, or the pretrained model, was trained with another vocabulary than the data's.

    Its token ids would stand for other tokens, and it would train on wrong input without an error.
    """
    if have_other_tokens(base, data.tokenizer_dir):
        raise ValueError(
            f"model: the one in {base} was trained with another tokenizer than the one of {data.name}. "
            f"To fix: set data.tokenizer to {base}"
        )


def _check_labels(base: Path, data: PreparedData) -> None:
    """Raises ValueError if the base was trained on other classes than the data's."""
    from transformers import AutoConfig

    if data.labels and (base / "config.json").is_file():
        check_labels(AutoConfig.from_pretrained(str(base), local_files_only=True), data, of=f"the base in {base}")


def _from_factory(spec: ModelSpec) -> nn.Module:
    assert spec.factory is not None
    model = resolve(spec.factory)(**spec.kwargs)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model factory {spec.factory} returned {type(model).__name__}. To fix: return a torch.nn.Module"
        )
    return model


def _load_weights(model: nn.Module, folder: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    try:
        missing, unexpected = load_model(model, folder / WEIGHTS, strict=False)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"model: the base in {folder} does not fit {type(model).__name__}: {' '.join(str(error).split())}. "
            f"To fix: give both models the same factory and kwargs"
        ) from error
    wrong = [f"{key} is missing" for key in sorted(missing)] + [f"{key} has no place" for key in sorted(unexpected)]
    if wrong:
        raise ValueError(
            f"model: the base in {folder} does not fit {type(model).__name__}: {_some(wrong)}. "
            f"To fix: give both models the same factory and kwargs"
        )


def _some(faults: list[str]) -> str:
    more = f", and {len(faults) - MAX_NAMED} more" if len(faults) > MAX_NAMED else ""
    return ", ".join(faults[:MAX_NAMED]) + more


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the CPU's random numbers within the context, and restores their state afterwards."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the accelerators too.
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Disables transformers' progress bars within the context, so that they do not mix with a worker's output."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
