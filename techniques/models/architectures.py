"""Hugging Face architectures by name: their configs, completed from and checked against the data, and module names."""

from __future__ import annotations

import difflib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringmaster.compat.transformers import MODEL_CONSTRUCTION
from ringmaster.errors import ModelTooLarge
from ringmaster.features import listed
from ringmaster.techniques.data_source import PreparedData
from ringmaster.techniques.job_specs import ModelSpec
from ringmaster.techniques.model_facts import (
    CAUSAL_SUFFIXES,
    POSITIONS_AFTER_PADDING,
    num_positions,
    num_positions_before,
    text_config_of,
)
from ringmaster.techniques.models.model_folders import read_json

if TYPE_CHECKING:
    from torch import nn


# Fields that configs accept although they have no such attribute: older spellings, and any special token.
CONFIG, MAX_CONFIG_BYTES = "config.json", 64_000_000
OF_CLASSES = frozenset({"num_labels", "id2label", "label2id"})
"""Fields of which each determines the others."""
SINGLE_LABEL = "single_label_classification"
ANONYMOUS = "LABEL_"
"""What the names of classes begin with where a model has none of its own."""
# What no model has, and what would take minutes or all of a machine's memory to find out by building it.
MAX_LAYERS, MAX_SIZE, MAX_MODULES = 10_000, 2**31 - 1, 200_000
MAX_BUILD_S = 60.0
LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "num_blocks", "num_encoder_blocks"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)
"""The different names of the number of layers in configs of transformers."""
WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "d_ff")
"""The different names of the width between the two or three matrices of a feed-forward layer."""
PIXELS, IMAGE_TOKEN = "pixel_values", "image_token_id"
TOKENS_OF_CONFIGS = (
    *("pad_token_id", "bos_token_id", "eos_token_id"),
    *("suppress_tokens", "begin_suppress_tokens"),
)
"""The fields of configs with tokens by their numbers."""
HIDDEN_SIZES = frozenset({"hidden_size", "hidden_sizes", "n_embd", "d_model", "dim", "dims", "embed_dim", "embed_dims"})
"""The different names of the width of the layers."""
OF_LOADING = frozenset(
    {"architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "auto_map"}
)
"""The keys of a saved config that are not fields of a model."""
TAKEN_ANYWAY = re.compile(r"rope_theta|rope_scaling|attn_implementation|\w+_token_id")


def kept_layers(num_layers: int, num_kept: int) -> list[int]:
    """Returns the layers that a model of fewer layers keeps: at equal distances, the first and the last among them."""
    if num_kept >= num_layers:
        return [*range(num_kept)]
    return [round(i * (num_layers - 1) / max(num_kept - 1, 1)) for i in range(num_kept)]


LOOKS_LIKE_MODEL = re.compile(r"[A-Za-z]\w*(For[A-Z]\w+|Model|Decoder|Encoder|WithProjection)")
UNLIKE_MODEL = re.compile(r"Auto[A-Z]|DataCollator|\w*Pre[Tt]rainedModel|\w+ForRope")


def is_architecture(name: str) -> bool:
    """Returns whether `transformers` exports a model class of that name.

    Most names are in the tables of its automatic classes, whose source is read first: the import of transformers takes
    half a second.
    """
    if not LOOKS_LIKE_MODEL.fullmatch(name) or UNLIKE_MODEL.match(name):
        return False
    return f'"{name}"' in _source_of_tables() or name in known_architectures()


@cache
def _source_of_tables() -> str:
    spec = find_spec("transformers")
    file = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py" if spec and spec.origin else None
    return file.read_text(errors="replace") if file is not None and file.is_file() else ""


@cache
def known_architectures() -> frozenset[str]:
    """The names of the model classes that `transformers` exports. Imports transformers, but not torch."""
    import transformers

    names = (name for name in dir(transformers) if LOOKS_LIKE_MODEL.fullmatch(name))
    return frozenset(name for name in names if not UNLIKE_MODEL.match(name))


def architecture(name: str) -> Any:
    """The model class that `transformers` exports as `name`. Raises ValueError with close matches if there is none."""
    import transformers

    result = getattr(transformers, name, None)
    if not isinstance(result, type) or not issubclass(result, transformers.PreTrainedModel):
        close = difflib.get_close_matches(name, sorted(known_architectures()), n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else "."
        raise ValueError(
            f"model: transformers {transformers.__version__} has no architecture {name!r}{hint} To fix: name a "
            f"model class such as LlamaForCausalLM, or give a factory"
        )
    return result


def fresh_config(spec: ModelSpec, data: PreparedData) -> Any:
    """The config of `spec.architecture`, with the fields that `spec.config` leaves open taken from the data.

    Raises ValueError if the architecture refuses a field's value, or if a field does not fit the data. Fields that no
    model reads are not detected here: see `undeclared_fields`.
    """
    assert spec.architecture is not None
    _check_sizes(spec.config)
    cls = architecture(spec.architecture)
    config_class = cls.config_class
    aliases: Mapping[str, str] = config_class.attribute_map
    default = _made(config_class, spec.architecture)
    given = {aliases.get(name, name) for name in spec.config}
    taken = {
        name: value
        for name, value in _from_data(default, data, is_causal=spec.architecture.endswith(CAUSAL_SUFFIXES))
        if aliases.get(name, name) not in given and not (name in OF_CLASSES and given & OF_CLASSES)
    }
    config = _made(config_class, spec.architecture, **{**taken, **spec.config})
    config.architectures = [spec.architecture]
    if "pad_token_id" not in given:
        _set_padding(config, data)
    _leave_out_foreign_tokens(config)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = data.end_of_text_id or 0
    if (vision := _vision_config(config)) is not config:
        of_part: Mapping[str, Any] = spec.config.get("vision_config") or {}
        for name, value in _of_images(data, vision):
            if name not in of_part:
                setattr(vision, name, value)
    return _checked(config, data, spec, of=spec.architecture)


def with_config_of(spec: ModelSpec, folder: Path) -> ModelSpec:
    """Returns a model whose config is that of the base in `folder`, overridden by its own fields.

    A config that gives the width of the layers is the model's whole config, and stays as it is, as does a model of
    another family than the base.
    """
    content = read_json(folder / CONFIG)
    own, theirs = spec.architecture, next(iter(content.get("architectures") or ()), None)
    if spec.from_pretrained or not own or not theirs or not HIDDEN_SIZES.isdisjoint(spec.config):
        return spec
    if family_of(own) != family_of(theirs):
        return spec
    # The data defines the classes and the padding token.
    left_out = {*OF_LOADING, *OF_CLASSES, "pad_token_id", "problem_type"}
    left_out |= set() if spec.config.keys().isdisjoint(LAYERS) else {*LAYERS}  # the same by another name
    fields = {name: value for name, value in content.items() if name not in left_out and value is not None}
    # What the class does not know, such as a field of another release, is nothing that the user has misspelt.
    unknown = {*undeclared_fields(replace(spec, config=fields))}
    known = {name: value for name, value in fields.items() if name not in unknown}
    return replace(spec, config={**known, **spec.config})


def family_of(name: str) -> str:
    """Returns what the names of the classes of one kind of model begin with: "Llama" of LlamaForCausalLM."""
    return re.split(r"For[A-Z]|Model|LMHead|DoubleHeads", name)[0]


def pretrained_config(spec: ModelSpec, data: PreparedData) -> Any:
    """The config of the model `spec.from_pretrained`, overridden by the fields of `spec.config`."""
    _check_sizes(spec.config)
    config, name = _pretrained(spec), spec.from_pretrained
    if spec.architecture is not None:
        config.architectures = [spec.architecture]
        if OF_CLASSES.isdisjoint(spec.config):
            for field, value in _classes_of(data):
                setattr(config, field, value)
    for field, value in spec.config.items():
        setattr(config, field, value)
    if "pad_token_id" not in spec.config:
        _set_padding(config, data)
    if not config.architectures:
        raise ValueError(
            f"model: {name!r} does not name its class. To fix: add it to model.config, e.g. "
            f"architectures: [LlamaForCausalLM]"
        )
    return _checked(config, data, spec, of=str(name))


def _pretrained(spec: ModelSpec) -> Any:
    from transformers import AutoConfig

    name = spec.from_pretrained
    assert name is not None
    is_folder = Path(name).is_dir()
    if is_folder and (Path(name) / CONFIG).is_file():
        _check_sizes(_read_config(Path(name) / CONFIG))
    try:
        return AutoConfig.from_pretrained(name, local_files_only=is_folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model: {name!r} cannot be loaded: {' '.join(str(error).split())}. To fix: give a folder that "
            f"save_pretrained wrote, or the name of a hub model that this machine can reach"
        ) from error


def _read_config(file: Path) -> Any:
    """The content of a model's config, {} where transformers will report what is wrong with it."""
    try:
        content = file.read_bytes()[: MAX_CONFIG_BYTES + 1]
        if len(content) > MAX_CONFIG_BYTES:
            raise ValueError(f"model: {file} has more than {MAX_CONFIG_BYTES / 1e6:g} MB. To fix: check the file")
        return json.loads(content)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        return {}


def _check_sizes(fields: Any, place: str = "model.config") -> None:
    """Raises ValueError on a number that no model has: a config of so many layers would fill the memory by itself."""
    items = fields.items() if isinstance(fields, Mapping) else enumerate(fields) if isinstance(fields, list) else ()
    for name, value in items:
        if isinstance(value, int):
            most = MAX_LAYERS if name in LAYERS else MAX_SIZE
            if abs(value) > most:
                shown = f"{value:,}" if abs(value) < 10**15 else f"about 2^{abs(value).bit_length()}"
                raise ValueError(f"{place}.{name} is {shown}; a model has at most {most:,}. To fix: lower it")
        else:
            _check_sizes(value, f"{place}.{name}")


def instantiate(config: Any) -> nn.Module:
    """The model of `config`, with fresh weights. Raises ValueError if the architecture refuses the config.

    Raises ModelTooLarge where it has too many modules, or takes too long to be built.
    """
    name = config.architectures[0]
    with MODEL_CONSTRUCTION, _limited(name):  # which counts the modules that any thread registers
        made: nn.Module = _made(architecture(name), name, config)
    return made


@contextmanager
def _limited(name: str) -> Iterator[None]:
    """Inside the context, a model of too many modules is no longer built."""
    from torch.nn.modules.module import register_module_module_registration_hook

    began_s, num_modules = time.monotonic(), 0

    def count(*_: Any) -> None:
        nonlocal num_modules
        num_modules += 1
        if num_modules > MAX_MODULES or time.monotonic() - began_s > MAX_BUILD_S:
            raise ModelTooLarge(
                f"model: {name} has more than {num_modules:,} modules by its config, and was no longer built after "
                f"{time.monotonic() - began_s:.0f} s. To fix: lower the numbers of layers and experts in model.config"
            )

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _made(cls: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Returns `cls(...)`; converts the many errors of configs and models for inconsistent fields to ValueError."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        return cls(*args, **kwargs)
    except ModelTooLarge:
        raise
    except (
        StrictDataclassError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as e:
        reason = " ".join(str(e).split()) or type(e).__name__
        raise ValueError(f"model: {name} refuses its config: {reason}. To fix: correct model.config") from e


def _set_padding(config: Any, data: PreparedData) -> None:
    """Gives a config the padding token of the data, by which classifiers of decoders find the last token of a row.

    Not a causal model's, which reads no padding; nor one by which positions are counted.
    """
    text = text_config_of(config)
    is_causal = bool(config.architectures) and config.architectures[0].endswith(CAUSAL_SUFFIXES)
    if data.pad_token_id is None or is_causal or text.model_type in POSITIONS_AFTER_PADDING:
        return
    for each in (config, text):
        each.pad_token_id = data.pad_token_id


def _classes_of(data: PreparedData) -> Iterator[tuple[str, Any]]:
    """Yields the config fields of the data's classes: their names, where they have some, else their number."""
    if data.labels:
        yield "id2label", dict(enumerate(data.labels))
        yield "label2id", {name: number for number, name in enumerate(data.labels)}
    elif data.num_labels is not None:
        yield "num_labels", data.num_labels


def _problem_of(data: PreparedData) -> str | None:
    """Returns the type of the problem by which a pipeline of transformers turns logits into probabilities, and by which
    some models compute their loss; None where the samples have no classes or numbers.
    """
    labels = next((tensor for tensor in data.tensors if tensor.name == "labels"), None)
    if labels is not None and labels.dtype.startswith("float"):
        return "multi_label_classification" if labels.shape else "regression"
    return None if data.num_labels is None else SINGLE_LABEL


def _from_data(default: Any, data: PreparedData, *, is_causal: bool) -> Iterator[tuple[str, Any]]:
    """Yields the config fields that the architecture has and that the data determines.

    A causal model needs no padding token, and the embedding of one would not be trained.
    """
    if hasattr(default, "num_labels"):
        yield from _classes_of(data)
    fields = {
        "vocab_size": data.vocab_size,
        "pad_token_id": None if is_causal else data.pad_token_id,
        "bos_token_id": data.end_of_text_id,
        "eos_token_id": data.end_of_text_id,
    }
    settable = {name: value for name, value in fields.items() if value is not None and hasattr(default, name)}
    yield from settable.items()
    if "token" in data.images and hasattr(default, IMAGE_TOKEN):
        yield IMAGE_TOKEN, data.images["token"]
    yield from _of_images(data, default)
    for further in listed("job", "CONFIG_FIELDS"):
        yield from further(default, data)
    positions = num_positions(default)
    if positions is not None and data.seq_len is not None:
        needed = data.seq_len + num_positions_before(default, pad_token_id=settable.get("pad_token_id"))
        if needed > positions + num_positions_before(default):
            yield "max_position_embeddings", needed


def _of_images(data: PreparedData, config: Any) -> Iterator[tuple[str, Any]]:
    """Yields the fields of a config that the images of the data determine, in the form that the config has them in."""
    if data.image_size is not None and hasattr(config, "image_size"):
        is_pair = isinstance(config.image_size, (list, tuple))
        yield "image_size", [data.image_size] * 2 if is_pair else data.image_size
    if data.num_channels is not None and hasattr(config, "num_channels"):
        yield "num_channels", data.num_channels


def _vision_config(config: Any) -> Any:
    """The part of a config that is of images, such as CLIP's; the config where it has no parts."""
    return getattr(config, "vision_config", config)


def undeclared_fields(spec: ModelSpec) -> list[str]:
    """The fields of `spec.config` that the config's class does not declare. They are misspelt, unless the model reads
    them.
    """
    if not spec.config:
        return []
    known = _declared(spec)
    return [name for name in spec.config if not hasattr(known, name) and not TAKEN_ANYWAY.fullmatch(name)]


def misspelt(spec: ModelSpec, names: Sequence[str]) -> str:
    """The error message for config fields that no model reads. Configs accept and silently ignore any keyword."""
    known = _declared(spec)
    close = difflib.get_close_matches(names[0], [*known.to_dict(), *known.attribute_map, "num_labels"])
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    of = spec.architecture or spec.from_pretrained
    return f"model: the config of {of} has no field {', '.join(names)}{hint} To fix: correct model.config"


def _declared(spec: ModelSpec) -> Any:
    """The model's config without the fields of `spec.config`."""
    if spec.from_pretrained is not None:
        return _pretrained(spec)
    assert spec.architecture is not None
    return _made(architecture(spec.architecture).config_class, spec.architecture)


def _leave_out_foreign_tokens(config: Any) -> None:
    """Removes the architecture's default special tokens that lie outside a small vocabulary: embeddings refuse them."""
    for part in (config, text_config_of(config)):
        vocab_size = getattr(text_config_of(part), "vocab_size", None)
        for name in TOKENS_OF_CONFIGS:
            given = getattr(part, name, None)
            tokens = given if isinstance(given, (list, tuple)) else [given]  # such as those that are never written
            numbers = [token for token in tokens if isinstance(token, int)]
            if isinstance(vocab_size, int) and any(not 0 <= token < vocab_size for token in numbers):
                setattr(part, name, None)


def check_labels(config: Any, data: PreparedData, *, of: str) -> None:
    """Raises ValueError where a model's classes have other names than the data's, or another order.

    The model's numbers would stand for other classes, and it would be trained on them without an error.
    """
    names = dict(getattr(config, "id2label", None) or {})
    learnt = tuple(str(names[number]) for number in sorted(names, key=int))
    if not data.labels or learnt == data.labels or is_anonymous(learnt):
        return
    raise ValueError(
        f"model: {of} has the classes {_few(learnt)}, and {data.name} has {_few(data.labels)}. To fix: set data.labels "
        "to the model's, in their order, or set model.architecture too, for a fresh head"
    )


def is_anonymous(classes: Sequence[str]) -> bool:
    """Returns whether a model's classes have no names of their own."""
    return all(name.startswith(ANONYMOUS) for name in classes)


def note_on_classes(spec: ModelSpec, data: PreparedData, weights_from: Path | None) -> str | None:
    """Returns what users should know where the classes of a trained head have no names, and get those of the data."""
    name = str(weights_from or "") or (None if spec.has_fresh_head else spec.from_pretrained)
    if name is None or not data.labels or is_anonymous(data.labels):
        return None
    config = read_json(Path(name) / CONFIG)
    learnt = [str(each) for _, each in sorted((config.get("id2label") or {}).items(), key=lambda item: int(item[0]))]
    if "Classification" not in str(config.get("architectures")) or not is_anonymous(learnt):
        return None
    return f"the classes of {name} have no names, and are taken for {_few(data.labels)}, in this order"


def _set_classes(config: Any, data: PreparedData, spec: ModelSpec, *, of: str) -> None:
    """Gives a config what its outputs are: the names of the data's classes, and the type of the problem.

    Raises ValueError where its classes have other names, or where `spec` defines another problem.
    """
    check_labels(config, data, of=of)
    if data.labels:
        config.id2label = {**config.id2label, **dict(enumerate(data.labels))}
        config.label2id = {name: number for number, name in config.id2label.items()}
    problem, given = _problem_of(data), spec.config.get("problem_type")
    if problem is None:
        return
    if problem == "regression" and data.num_labels is not None and config.num_labels != data.num_labels:
        raise ValueError(
            f"model: {of} has {config.num_labels} outputs, and a row of {data.name} has {data.num_labels} number to "
            f"predict. To fix: set model.config.num_labels to {data.num_labels}, for a fresh head of that size"
        )
    if given not in (None, problem):
        raise ValueError(
            f"model: config.problem_type is {given}, and the labels of {data.name} make it {problem}. To fix: leave it "
            "out, or write labels as lists for several classes a row, and as numbers with kind text-regression"
        )
    if problem != SINGLE_LABEL or getattr(config, "problem_type", None) is not None:
        config.problem_type = problem


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


def _more_tokens(number: int | None) -> str:
    """The remedy where a tokenizer has more tokens than the model, also if it is the model's own."""
    return (
        "set data.tokenizer to the model's own; if it is, give the model embeddings of all its tokens, by "
        f"resize_token_embeddings({number}) and save_pretrained, or by model.config.vocab_size for a new model"
    )


def _checked(config: Any, data: PreparedData, spec: ModelSpec, *, of: str) -> Any:
    """`config`, set up for training. Raises ValueError if it does not fit the data."""
    at_least = {
        "vocab_size": (data.vocab_size, "tokens", _more_tokens(data.vocab_size)),
        "num_labels": (data.num_labels, "labels", "set model.config.num_labels, for a fresh head of that size"),
    }
    for name, (needed, what, remedy) in at_least.items():
        has = getattr(config, name, getattr(text_config_of(config), name, None))
        if needed is not None and isinstance(has, int) and has < needed:
            raise ValueError(f"model: {of} has {name} {has}, and {data.name} has {needed} {what}. To fix: {remedy}")
    if data.seq_len is not None and (most := num_positions(config)) is not None and most < data.seq_len:
        raise ValueError(
            f"model: {of} has positions for {most} tokens, and {data.name} has {data.seq_len} tokens a sample. To fix: "
            "lower data.seq_len"
        )
    token, known = data.images.get("token"), getattr(config, IMAGE_TOKEN, None)
    if token is not None and token != known:
        raise ValueError(
            f"model: {of} has the {IMAGE_TOKEN} {known}, and an image in {data.name} is token {token}. To fix: set "
            "data.tokenizer to the model's own"
        )
    _set_classes(config, data, spec, of=of)
    _check_images(config, data, of=of)
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if isinstance(size, int) and isinstance(patch, int) and not (0 < patch <= size and size % patch == 0):
        raise ValueError(
            f"model: {of} cuts images of {size} pixels into patches of {patch}. "
            f"To fix: set model.config.patch_size to a divisor of {size}"
        )
    set_cache(config, uses=False)  # past keys and values serve generation only
    return config


def set_cache(config: Any, *, uses: bool) -> None:
    """Sets whether a model keeps past keys and values, in its config and in the part of it that is of text."""
    for part in (config, text_config_of(config)):
        if hasattr(part, "use_cache"):
            part.use_cache = uses


def _check_images(config: Any, data: PreparedData, *, of: str) -> None:
    """Raises ValueError where a model takes images of other channels, or of another size."""
    vision, part = _vision_config(config), "vision_config." if hasattr(config, "vision_config") else ""
    size = data.image_size
    shape = (
        (data.num_channels, size, size) if size else {each.name: each.shape for each in data.tensors}.get(PIXELS, ())
    )
    if len(shape) != 3:  # no images, or images in patches
        return
    channels, sides = getattr(vision, "num_channels", None), getattr(vision, "image_size", None)
    sides = [*sides] if isinstance(sides, (list, tuple)) else [sides, sides]
    remedy = f"To fix: make them equal, by model.config.{part}"
    if isinstance(channels, int) and shape[0] not in (None, channels):
        raise ValueError(
            f"model: {of} has {part}num_channels {channels}, and {data.name} has {shape[0]}. {remedy}num_channels or "
            "data.kwargs.mode"
        )
    if len(sides) != 2 or None in sides or sides == [*shape[1:]]:
        return
    if not _takes(config.architectures[0], config.to_json_string(use_diff=False), shape):
        has, given = (str(a) if a == b else f"{a} x {b}" for a, b in (sides, shape[1:]))
        raise ValueError(
            f"model: {of} has {part}image_size {has}, and {data.name} has {given}. {remedy}image_size or "
            "data.kwargs.image_size"
        )


@cache  # a large model takes a second, and each process needs it several times
def _takes(name: str, fields: str, shape: tuple[int | None, ...]) -> bool:
    """Whether a model takes images of a shape, regardless of its config.

    Convolutions take images of any size, and some models, such as DINOv2, interpolate the embeddings of positions.

    name: of its class. fields: those of its config, as JSON.
    """
    import torch

    with torch.device("meta"):
        model = instantiate(architecture(name).config_class.from_dict(json.loads(fields))).eval()
        try:
            model(**{PIXELS: torch.zeros(1, *(each or 1 for each in shape))})
        except (ValueError, RuntimeError, TypeError, AssertionError, NotImplementedError):
            return False
    return True


def architecture_in(folder: Path) -> str | None:
    """Returns the model class that `save_pretrained` recorded in a folder, or None where none is recorded."""
    names = read_json(folder / CONFIG).get("architectures")
    return str(names[0]) if isinstance(names, list) and names else None
