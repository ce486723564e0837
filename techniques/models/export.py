"""Export of a model, of a checkpoint's model or of an adapter, in the formats that `from_pretrained` and peft load."""

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ringmaster.codec import to_json
from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore, publish
from ringmaster.techniques.checkpoints.state import Reader
from ringmaster.techniques.checkpoints.storage import LocalStorage
from ringmaster.techniques.checkpoints.tensor_files import DTYPES, LazyTensor, blocks_of
from ringmaster.techniques.data.chat_template import turn_end_of
from ringmaster.techniques.data_source import PreparedData, data_source_of
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_specs import Adapter, ModelSpec
from ringmaster.techniques.loss import compares
from ringmaster.techniques.models import model_folders, peft_format
from ringmaster.techniques.models.adapters import saved_modules, sites, unambiguous_targets
from ringmaster.techniques.models.architectures import family_of, instantiate, set_cache
from ringmaster.techniques.models.build import build_model, factory_arguments, no_progress_bar, skeleton
from ringmaster.techniques.models.quantization import compressed_tensors, stored_tensors
from ringmaster.techniques.models.sentence_embeddings import copy_modules

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
    job: Job | None = None,
) -> None:
    """Exports a model to `folder`, which is written aside and then renamed.

    A Hugging Face model is written as its architecture's `from_pretrained` loads it, with the tokenizer or the image
    processor of its data or, where the data has none, of its base. A factory's model is written as `model.safetensors`,
    with a `model.json` that names the factory.

    A model without a head keeps the modules of a Sentence-Transformers base: pooling and normalization.

    How it generates is kept as well: its `generation_config`, with the tokens that end an answer by a chat template of
    the data's among those that end a text.

    model: the trained model. Only its configs are used; its weights are not read.
    state: full tensors under the model's own names, on any device.
    base: the folder or hub name whose weights the training began with.
    job: the one that trained it, whose loss is stored with it.
    """
    with publish(folder) as aside:
        _save_loss(aside, job, began_with=base)
        if spec.factory is not None:
            _save_factory(aside, spec, skeleton(spec, prepared), state, prepared=prepared)
        else:
            _save_pretrained(aside, _config_to_save(model), state)
            _save_generation(aside, model, prepared)
            _copy_description(aside, model, prepared=prepared, base=base)


def export_merged(source: Path, folder: Path, *, spec: ModelSpec) -> None:
    """Exports an adapter, merged into the weights of its base, as a whole model in the dtype of the base.

    spec: the model of the base. Raises ValueError where weights cannot hold the adapter, such as a prefix.
    """
    nothing = PreparedData(name="export", digest="", num_samples=0, num_held_out=0, kind="other", source="export")
    model = build_model(_with_trained_head(spec, source), data=nothing, seed=0, weights_from=source)
    base = peft_format.base_of(source)
    config = {} if base is None else model_folders.read_json(base / model_folders.CONFIG)
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"))
    of_base = str(base or peft_format.base_name(source))
    export_model(folder, spec=spec, model=model.to(dtype), state=model.state_dict(), prepared=nothing, base=of_base)
    copy_processors(folder, prepared=nothing, base=str(source))  # its own come before those of the base


HEADS = {"SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification"}
"""What the names of classes with a head of classes end with, by peft's name of the task."""


def _with_trained_head(spec: ModelSpec, source: Path) -> ModelSpec:
    """Returns the model of a base with the head of classes that an adapter was trained with, if the base lacks it."""
    config = peft_format.read_config(source)
    end, base = HEADS.get(str(config.get("task_type"))), peft_format.base_of(source)
    own = [] if base is None else model_folders.read_json(base / model_folders.CONFIG).get("architectures") or []
    if end is None or not own or own[0].endswith(end):
        return spec
    saved = {*config.get("modules_to_save", ())}
    shapes = [shape for name, (_, shape) in model_folders.tensor_shapes(source).items() if saved & {*name.split(".")}]
    num_labels = next((shape[0] for shape in reversed(shapes) if len(shape) == 2), None)
    if num_labels is None:
        return spec
    return replace(spec, architecture=family_of(own[0]) + end, config={**spec.config, "num_labels": num_labels})


def export_quantized(
    folder: Path,
    *,
    spec: ModelSpec,
    model: nn.Module,
    quantization: Mapping[str, Any],
    prepared: PreparedData,
    base: str | None = None,
    job: Job | None = None,
) -> None:
    """Exports a quantized model: weights in 8 or 4 bits and scales in safetensors, and the layers in its config.

    Arguments as of `export_model`. quantization: the result of `quantize`.
    """
    from safetensors.torch import save_file

    quantized = frozenset(f"{name}.weight" for name in quantization["modules"])
    others = {name: tensor for name, tensor in model.state_dict().items() if name not in quantized}
    tensors = _untied(model, others, but=quantized) | stored_tensors(model, quantization)
    with publish(folder) as aside:
        _save_loss(aside, job)
        save_file(tensors, aside / model_folders.WEIGHTS, metadata={"format": "pt"})
        if spec.factory is not None:
            _describe_factory(aside, spec, prepared, **{model_folders.QUANTIZATION: quantization})
            return
        config = _config_to_save(model)
        config.quantization_config = compressed_tensors(model, quantization)
        setattr(config, model_folders.QUANTIZATION, quantization)
        (aside / model_folders.CONFIG).write_text(config.to_json_string())
        _copy_description(aside, model, prepared=prepared, base=base)


def _save_loss(folder: Path, job: Job | None, *, began_with: str | None = None) -> None:
    """Writes the loss that a job names, by which its model is evaluated, and the kind of data that suits it.

    began_with: the weights with which a loss may compare those of a whole model.
    """
    if job is not None and job.loss is not None:
        kind = data_source_of(job.data).name
        content = {"loss": job.loss, "loss_options": to_json(job.loss_options), "kind": kind}
        if compares(job.loss, job.loss_options):
            content[model_folders.REFERENCE] = (
                began_with if job.adaptation is None and not job.checkpoint_roots else None
            )
        (folder / model_folders.LOSS).write_text(json.dumps(content))


def _copy_description(folder: Path, model: nn.Module, *, prepared: PreparedData, base: str | None) -> None:
    """Copies the files of a model other than its weights and its config."""
    copy_processors(folder, prepared=prepared, base=base)
    if _has_no_head(model):
        copy_modules(base, folder, seq_len=prepared.seq_len)


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


def _config_to_save(model: Any) -> Any:
    config = copy.deepcopy(model.config)
    set_cache(config, uses=True)
    return config


def _save_pretrained(folder: Path, config: Any, state: Mapping[str, Tensor]) -> None:
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
    of_turn = () if prepared.tokenizer_dir is None else turn_end_of(prepared.tokenizer_dir).token_ids
    if of_turn:
        named = config.eos_token_id
        ends = [] if named is None else list(named) if isinstance(named, (list, tuple)) else [named]
        config.eos_token_id = list(dict.fromkeys([*ends, *of_turn]))
    # Not `save_pretrained`, which refuses settings that many models of the hub have, such as a temperature for nothing.
    config.to_json_file(file)


def _save_factory(
    folder: Path, spec: ModelSpec, whole: nn.Module, state: Mapping[str, Tensor], *, prepared: PreparedData
) -> None:
    from safetensors.torch import save_file

    save_file(_untied(whole, state), folder / model_folders.WEIGHTS, metadata={"format": "pt"})
    _describe_factory(folder, spec, prepared)


def _describe_factory(folder: Path, spec: ModelSpec, prepared: PreparedData, **more: Any) -> None:
    kwargs = to_json(factory_arguments(spec, prepared))
    (folder / model_folders.FACTORY).write_text(
        json.dumps({"factory": spec.factory, "kwargs": kwargs, **more}, indent=1)
    )
    if prepared.features:  # which the model encodes by itself
        copy_processors(folder, prepared=prepared, base=None)


def _untied(whole: nn.Module, state: Mapping[str, Tensor], *, but: frozenset[str] = frozenset()) -> dict[str, Tensor]:
    """`state` on the CPU with one name for each tensor, as safetensors requires: tied tensors appear once.

    but: the names of tensors that are stored in another way, which `state` lacks.
    """
    first: dict[int, str] = {}
    kept: dict[str, Tensor] = {}
    for name, tensor in whole.state_dict(keep_vars=True).items():
        first.setdefault(id(tensor), name)
        if name in state:
            kept.setdefault(first[id(tensor)], state[name].detach().cpu().contiguous())
    missing = sorted(set(first.values()) - set(kept) - but)
    assert not missing, f"the state lacks {missing[:3]}"
    return kept


def export_checkpoint(root: str, name: str, *, finished: Path, folder: Path) -> None:
    """Writes the model of checkpoint `name` under `root` to a new folder.

    finished: the folder of the model that the training ended with. All files but the weights are copied from it, and
        its weights' files determine the names and dtypes of the tensors.
    Raises ValueError if the checkpoint is incomplete or belongs to another model.
    """
    checkpoint = CheckpointStore(root).whole(name)
    if checkpoint is None:
        raise ValueError(f"checkpoint {name} under {root} is not whole")
    stored = checkpoint.manifest.tensors
    with Reader(checkpoint) as reader, publish(folder) as aside:
        for file in sorted(path for path in finished.rglob("*") if path.is_file()):
            path = file.relative_to(finished)
            if file.suffix != ".safetensors":
                (aside / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, aside / path)
                continue
            tensors = {}
            for tensor, (stored_dtype, now) in model_folders.tensors_in(file).items():
                name_here = f"model/{peft_format.parameter_name(tensor)}"
                if name_here not in stored:
                    raise ValueError(f"checkpoint {name} under {root} has no {tensor}: it is of another model")
                shape, dtype = stored[name_here].shape, DTYPES[stored_dtype]
                load = partial(_read, reader, name_here, dtype)
                if shape != now and ".lora_" in tensor:  # the last half is what was subtracted from the base
                    axis = int(".lora_B." in tensor)
                    load, shape = partial(_with_last_half, load, file, tensor, axis), now
                tensors[tensor] = LazyTensor(dtype=dtype, shape=shape, load=load)
            LocalStorage(aside).write(path.as_posix(), blocks_of(tensors, metadata=model_folders.metadata_of(file)))


def _read(reader: Reader, name: str, dtype: torch.dtype) -> torch.Tensor:
    return reader.whole(name).to(dtype)


def _with_last_half(load: Callable[[], Tensor], file: Path, name: str, axis: int) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        first = load()
        return torch.cat([first, opened.get_tensor(name).narrow(axis, first.shape[axis], first.shape[axis])], dim=axis)


def export_adapter(
    folder: Path,
    *,
    adapter: Adapter,
    spec: ModelSpec,
    base: str | None,
    state: Mapping[str, Tensor],
    prepared: PreparedData,
    job: Job | None = None,
    add_files: Callable[[Path], None] = lambda aside: None,
) -> None:
    """Writes an adapter to `folder`: first to a temporary folder, which is then renamed.

    spec: the model that the adapter is on.
    base: the folder or hub name with that model's weights, if any.
    state: the adapter's whole tensors, under the model's names.
    job: as of `export_model`; the metadata of the weights' file keep what changes the weights of its base.
    add_files: adds further files to the temporary folder.
    """
    from safetensors.torch import save_file

    model, adapter = skeleton(spec, prepared), peft_format.resolved(adapter)
    at = sites(model, adapter)
    targets, feedforward = unambiguous_targets(model, at)
    config = peft_format.config_of(
        adapter,
        model=model,
        base=base,
        targets=targets,
        feedforward=feedforward,
        saved=saved_modules(model, adapter),
    )
    tensors = {peft_format.tensor_name(name): value.detach().cpu().contiguous() for name, value in state.items()}
    with publish(folder) as aside:
        _save_loss(aside, job)
        (aside / peft_format.ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True))
        metadata = peft_format.FORMAT | ({} if job is None else job.base_changes)
        save_file(tensors, aside / peft_format.ADAPTER_WEIGHTS, metadata=metadata)
        add_files(aside)
        _copy_description(aside, model, prepared=prepared, base=base)


def _has_no_head(model: nn.Module) -> bool:
    """Whether a model is the body of its architecture, whose hidden states Sentence-Transformers pools."""
    return getattr(model, "base_model", None) is model
