"""Building of models on the CPU in fp32, with weights that depend on the seed alone or are read from safetensors."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.codec import to_json
from ringmaster.compat.transformers import MODEL_CONSTRUCTION, set_attention
from ringmaster.features import listed
from ringmaster.registry import resolve
from ringmaster.techniques.data.tokenizer_folders import have_other_tokens
from ringmaster.techniques.data_source import PreparedData
from ringmaster.techniques.job_specs import ModelSpec
from ringmaster.techniques.model_facts import IMPLEMENTATIONS, check_attention
from ringmaster.techniques.models.architectures import (
    architecture,
    check_labels,
    fresh_config,
    instantiate,
    pretrained_config,
)
from ringmaster.techniques.models.model_folders import (
    FACTORY,
    INDEX,
    WEIGHTS,
    few,
    misfits,
    quantization_of,
    read_json,
    tensor_shapes,
    tensors_in,
)
from ringmaster.techniques.models.peft_format import base_changes_of, base_of, is_adapter, read_adapter
from ringmaster.techniques.models.quantization import load_quantized
from ringmaster.techniques.models.weight_values import check_stored_values, check_values

# The methods of quantization whose tensors transformers turns into the model's own without reading values.
OF_KNOWN_TENSORS = ("fp8", "mxfp4")
# The dtypes of weights that are plain numbers. Others need scales, of which only quantized models know.
PLAIN = ("F64", "F32", "F16", "BF16")
SCALE = "_scale_inv"
"""What follows a tensor's name in that of its scales, by the format of fp8 models."""


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
    if weights_from is not None:
        _check_features(weights_from, data)
    with seeded(seed):
        if quantized is not None and how is not None:
            _check_vocabulary(quantized, data)
            model = load_quantized(_fresh(spec, data), quantized, how)
        elif spec.factory is not None:
            model = _from_factory(spec, data)
            if weights_from is not None:
                _load_weights(model, weights_from)
        else:
            config = model_config(spec, data)
            _quantization(config, of=spec.from_pretrained or str(weights_from))
            if weights_from is not None:
                _check_vocabulary(weights_from, data)
                _check_labels(weights_from, data)
            elif spec.from_pretrained is not None:
                _check_vocabulary(Path(spec.from_pretrained), data)
            model = _from_config(spec, config, weights_from=weights_from)
    if how is None and (folder := weights_from or _local_folder(spec.from_pretrained)) is not None:
        check_values(model, folder)
    _begin_as_targets(model, data)
    return model.float().train()


def _begin_as_targets(model: Any, data: PreparedData) -> None:
    """Makes an encoder-decoder begin what it generates as the targets of its data begin in training.

    The decoder's first input is what the model puts before the labels: a fixed token or, in mBART, the code of the
    language at their end. Where every target begins with a special token, such as the code of NLLB, so does what is
    generated.
    """
    if not data.empty_target or not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return
    first = data.empty_target[0]
    if any(begin(model, data) for begin in listed("trainer", "TARGET_STARTS")):
        return
    if (shift := getattr(model, "prepare_decoder_input_ids_from_labels", None)) is not None:
        model.config.decoder_start_token_id = int(shift(labels=torch.tensor([data.empty_target]))[0, 0])
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.decoder_start_token_id = model.config.decoder_start_token_id
        model.generation_config.forced_bos_token_id = None if first == data.end_of_text_id else first


def check_weights(spec: ModelSpec, *, data: PreparedData, weights_from: Path | None = None) -> None:
    """Raises the ValueErrors of `build_model` about weights, of which only the headers of the files are read.

    Weights that are not on this machine yet are not checked.
    """
    from ringmaster.techniques.models.adapters import attach

    check_model(spec)
    if weights_from is not None and is_adapter(weights_from):
        _check_vocabulary(weights_from, data)
        check_weights(spec, data=data, weights_from=base_of(weights_from))
        attach(skeleton(spec, data), read_adapter(weights_from), seed=0)
        return
    folder = weights_from or _local_folder(spec.from_pretrained)
    if folder is None or quantization_of(folder) is not None:
        return
    _check_features(folder, data)
    _check_vocabulary(weights_from or Path(str(spec.from_pretrained)), data)
    tensor_shapes(folder)
    check_stored_values(folder)
    if spec.factory is not None:
        _check_tensors(skeleton(spec, data), folder)
        return
    if weights_from is not None:
        _check_labels(weights_from, data)
    config = model_config(spec, data)
    if _quantization(config, of=spec.from_pretrained or str(folder)) in (None, *OF_KNOWN_TENSORS):
        local = spec if weights_from is not None else replace(spec, from_pretrained=str(folder))
        _from_config(local, config, weights_from=weights_from, of_headers=True)


def _local_folder(name: str | None) -> Path | None:
    """Returns the folder of a model's weights on this machine, of a name on the hub in its cache; None if not here."""
    from huggingface_hub import try_to_load_from_cache

    if name is None or Path(name).is_dir():
        return None if name is None else Path(name)
    for file in (WEIGHTS, INDEX):
        if isinstance(result := try_to_load_from_cache(name, file), str):
            return Path(result).parent
    return None


def _quantization(config: Any, *, of: str) -> str | None:
    """Returns the method by which another program has quantized a model; None where none has.

    Its config is made to request plain weights. Otherwise transformers chooses by the devices that a process sees.
    Raises ValueError if it cannot be loaded here, or where its weights stay quantized, so that no step changes them.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    method = (
        quantization.get("quant_method")
        if isinstance(quantization, Mapping)
        else getattr(quantization, "quant_method", None)
    )
    if method in OF_KNOWN_TENSORS and isinstance(quantization, Mapping):
        quantization = config.quantization_config = {**quantization, "dequantize": True}
    try:
        quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=True)
        quantizer.validate_environment(device_map=None, weights_only=True)
        if not getattr(quantizer.quantization_config, "dequantize", False):
            raise ValueError("its weights stay quantized when they are loaded, and no step can change them")
    except (AttributeError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"model: {of} is quantized ({method or 'by an unknown method'}) and cannot be loaded here: "
            f"{' '.join(str(error).split())}. To fix: name the model that it was quantized from"
        ) from error
    return str(method)


def _merged(spec: ModelSpec, data: PreparedData, seed: int, folder: Path) -> nn.Module:
    """The base model of an adapter, with the adapter merged into its weights."""
    from ringmaster.techniques.models.adapter_modules import merge
    from ringmaster.techniques.models.adapters import attach

    _check_vocabulary(folder, data)
    return merge(attach(build_base(spec, data=data, seed=seed, folder=folder), read_adapter(folder), seed=seed))


def build_base(spec: ModelSpec, *, data: PreparedData, seed: int, folder: Path) -> nn.Module:
    """The model that the adapter in a folder is on, changed as it was when the adapter was trained."""
    base = base_of(folder)
    if spec.has_fresh_head and base is not None:  # the head that it may lack is among the adapter's weights
        spec, base = replace(spec, from_pretrained=str(base)), None
    model = build_model(spec, data=data, seed=seed, weights_from=base)
    for change in base_changes_of(folder):
        change.change_base(model, read_adapter(folder))
    return model


def _fresh(spec: ModelSpec, data: PreparedData) -> nn.Module:
    """The model with fresh weights, from a factory or a config."""
    if spec.factory is not None:
        return _from_factory(spec, data)
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
        names = " and ".join(given) or "none"
        raise ValueError(f"model: {names} given. To fix: give architecture, from_pretrained or both, or a factory")
    if spec.factory is not None and spec.config:
        raise ValueError("model: a factory takes no config. To fix: give kwargs")
    if spec.factory is None and spec.kwargs:
        raise ValueError("model: kwargs are a factory's. To fix: give config")
    check_attention(spec)


def model_config(spec: ModelSpec, data: PreparedData) -> Any:
    """The Hugging Face config of a model that does not come from a factory."""
    config = pretrained_config(spec, data) if spec.from_pretrained is not None else fresh_config(spec, data)
    if spec.attention != "auto":
        set_attention(config, IMPLEMENTATIONS[spec.attention])
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
                return _from_factory(spec, data).train()
        except RuntimeError:  # the factory reads values, which meta tensors do not have
            return _from_factory(spec, data).train()


def _from_config(spec: ModelSpec, config: Any, *, weights_from: Path | None, of_headers: bool = False) -> nn.Module:
    """The model with its weights; with `of_headers` without them, after the same checks."""
    cls = architecture(config.architectures[0])
    if weights_from is not None:
        model, fault = _load_pretrained(cls, str(weights_from), config, exact=True, of_headers=of_headers)
        if fault:
            raise ValueError(
                f"model: the base in {weights_from} does not fit {cls.__name__}: {fault}. "
                f"To fix: give both models the same config and data"
            )
        return model
    if spec.from_pretrained is None:
        return instantiate(config)
    model, fault = _load_pretrained(
        cls, spec.from_pretrained, config, fresh_head=spec.has_fresh_head, of_headers=of_headers
    )
    if fault:
        raise ValueError(
            f"model: the weights of {spec.from_pretrained!r} do not fit {cls.__name__}: {fault}. To fix: take back "
            f"what model.config changes; for a fresh head, set num_labels or architectures there"
        )
    return model


def _load_pretrained(
    cls: Any, name: str, config: Any, *, exact: bool = False, fresh_head: bool = False, of_headers: bool = False
) -> tuple[nn.Module, str]:
    """The model, and a message with the tensors that its file lacks or has in another shape; empty if it fits.

    exact: tensors of the file that the model does not have are faults too.
    fresh_head: tensors outside of the base model, and of its pooler, may be missing or have another shape; they stay
        fresh.
    of_headers: load the same files onto the meta device, which reads the names and shapes of tensors, and no values.
    """
    source: dict[str, Any] = {
        "local_files_only": Path(name).is_dir(),
        "device_map": {"": "meta"} if of_headers else None,
    }
    is_quantized = getattr(config, "quantization_config", None) is not None  # no longer, as soon as it is loaded
    try:
        with MODEL_CONSTRUCTION, no_progress_bar():
            model, info = cls.from_pretrained(
                name, config=config, dtype=torch.float32, use_safetensors=True,
                trust_remote_code=False, ignore_mismatched_sizes=True, output_loading_info=True, **source,
            )  # fmt: skip
    except RuntimeError as error:  # tensors that transformers joins, such as those of experts, are not all there
        reason = " ".join(str(error.__cause__ or error.__context__ or error).split())
        raise ValueError(
            f"model: the weights of {name!r} do not fit {cls.__name__}: {reason}. To fix: save the model again"
        ) from error
    except OSError as error:
        raise ValueError(
            f"model: {name!r} cannot be loaded: {' '.join(str(error).split())}. To fix: give a folder or hub model "
            f"with safetensors weights (pickled ones are never loaded)"
        ) from error
    generation = getattr(model, "generation_config", None)
    if generation is not None and config.is_encoder_decoder:  # which fills up what it writes with the data's padding
        generation.pad_token_id = config.pad_token_id
    body = f"{cls.base_model_prefix}."
    wrong = [f"{key} is missing" for key in sorted(info["missing_keys"])]
    wrong += [f"{key} is {list(a)}, not {list(b)}" for key, a, b in sorted(info["mismatched_keys"])]
    # A body that was saved with another head may lack the pooler, which the head reads.
    wrong = [fault for fault in wrong if not fresh_head or (fault.startswith(body) and ".pooler." not in fault)]
    if exact:
        wrong += [f"{key} has no place" for key in sorted(info["unexpected_keys"])]
    if of_headers and not wrong:
        stored = tensor_shapes(Path(name))
        with_scale = {key for key in stored if f"{key}{SCALE}" in stored} if is_quantized else set()
        wrong = _foreign_types(model, {key: stored[key] for key in stored.keys() - with_scale})
    return model, few(wrong)


def _foreign_types(model: nn.Module, stored: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    """Returns a message for each parameter whose stored values cannot be its values."""
    return [
        f"{name} is stored as {stored[name][0]}, as quantized models are"
        for name, parameter in model.named_parameters()
        if name in stored and stored[name][0] not in PLAIN and parameter.is_floating_point()
    ]


def _check_tensors(model: nn.Module, folder: Path) -> None:
    """Raises ValueError if the model of a factory has other parameters and buffers than a folder."""
    tensors = tensors_in(folder / WEIGHTS)
    stored = {name: shape for name, (_, shape) in tensors.items()}
    shared: dict[int, dict[str, Any]] = {}  # safetensors stores one of the names of a shared tensor
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            shared.setdefault(id(tensor), {})[name] = tensor.shape
    own = {name: shapes[name] for shapes in shared.values() for name in shapes.keys() & stored.keys() or {min(shapes)}}
    wrong = _foreign_types(model, tensors) + misfits(stored, own)
    if wrong:
        raise ValueError(
            f"model: the base in {folder} does not fit {type(model).__name__}: {few(wrong)}. "
            f"To fix: give both models the same factory and kwargs"
        )


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


def factory_arguments(spec: ModelSpec, data: PreparedData) -> dict[str, Any]:
    """Returns the arguments of a model's factory: its `kwargs`, and `features` and `parts` of data that has some."""
    given = {name: value for name in ("features", "parts") if (value := to_json(getattr(data, name)))}
    return {**spec.kwargs, **given}


def _check_features(base: Path, data: PreparedData) -> None:
    """Raises ValueError if the base was trained on features that were encoded in another way than the data's."""
    features = read_json(base / FACTORY).get("kwargs", {}).get("features")
    if data.features and features is not None and features != to_json(data.features):
        raise ValueError(
            f"model: the one in {base} has other categories or statistics than {data.name}. To fix: set "
            f"data.kwargs.encoded_as to {base}"
        )


def _from_factory(spec: ModelSpec, data: PreparedData) -> nn.Module:
    assert spec.factory is not None
    model = resolve(spec.factory)(**factory_arguments(spec, data))
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model factory {spec.factory} returned {type(model).__name__}. To fix: return a torch.nn.Module"
        )
    return model


def _load_weights(model: nn.Module, folder: Path) -> None:
    from safetensors.torch import load_model

    _check_tensors(model, folder)
    load_model(model, folder / WEIGHTS, strict=False)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the CPU's random numbers within the context, and restores their state afterwards.

    All threads share these numbers: one at a time is inside such a context, or makes a model.
    """
    with MODEL_CONSTRUCTION, torch.random.fork_rng(devices=[]):
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
