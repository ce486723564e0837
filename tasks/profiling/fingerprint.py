"""Fingerprints of jobs and profiles: jobs with equal fingerprints share profiles, whatever their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ringmaster.techniques.interface import registry
from ringmaster.techniques.interface.job import Job
from ringmaster.techniques.interface.values import digest, to_json
from ringmaster.techniques.losses.registry import reward_names, source_of
from ringmaster.techniques.runtime.data.sources.registry import installed_source

DATA_SHAPE = ("kind", "seq_len", "vocab_size", "num_labels", "image_size", "num_channels")
LIBRARIES = ("torch", "transformers")
# A fact that release 0.1 recorded, with the value of almost all models: profiles that it measured stay valid.
OF_0_1 = {"has_batch_statistics": False}
TRIALS_VERSION = 2  # the version of the measurement, incremented when new profiles are not comparable with old ones


def speed_key(
    job: Job,
    data: Mapping[str, Any],
    *,
    facts: Mapping[str, Any] | None = None,
    import_paths: tuple[str, ...] = (),
) -> str:
    """Returns a key that is equal for jobs that cannot differ in speed.

    Such jobs have the same model shape, batch shape, precision and optimizer.

    data: the JSON form of the prepared data (its kind and shapes).
    facts: the JSON form of the model's facts, which distinguish two models that were saved under one name.
    import_paths: the folders of users' factories, whose source code is part of the key.
    """
    spec = job.data
    data_shape = {key: data[key] for key in DATA_SHAPE}
    if data.get("tensors"):  # no key without, so that earlier profiles stay valid
        data_shape["tensors"] = data["tensors"]
    factories = [
        name for name in (job.model.factory, source_of(job.loss), spec.factory, installed_source(spec)) if name
    ]
    rewards = reward_names(job.loss, job.loss_options)
    factories += rewards
    # Data beyond what one evaluation reads does not change the speed: tomorrow's data needs no new profile.
    num_evaluated = min(data["num_held_out"], job.evaluation.max_batches * job.global_batch_size)
    return digest(
        {
            "model": to_json(job.model),
            "facts": {**OF_0_1, **facts} if facts else {},
            "adapter": to_json(job.adapter),
            "data": {**data_shape, "kwargs": to_json(spec.kwargs)},
            "loss": job.loss,
            "precision": [job.precision, job.communication, job.compile],
            "optimizer": [job.optimizer.name, sorted(job.optimizer.options)],
            "clips": job.clip_grad_norm is not None,
            "global_batch_size": job.global_batch_size,
            "exact": job.exact,  # decides which configs exist
            "evaluation": [list(job.evaluation.metrics), num_evaluated],
            "sources": {name: source_digest(name, import_paths) for name in factories} | _scripts(job.model.command),
            **({"generation": dict(job.loss_options)} if rewards else {}),  # lengths and numbers of completions
            **({"freeze": list(job.freeze)} if job.freeze else {}),
            **_adaptation(job),  # no key without an adaptation, so that earlier profiles stay valid
        }
    )


def fingerprint(
    key: str,
    *,
    technique: str,
    config: Mapping[str, Any],
    num_devices: int,
    device_kind: str,
    memory_bytes: int = 0,
    code: str = "",
) -> str:
    """Returns the name under which a profile is stored.

    It covers everything that matters, including library versions and the kind of device.

    memory_bytes: the memory of a device, as a config that ran out of memory may fit into more memory.
    code: the digest of a user's own technique.
    """
    device = [device_kind, round(memory_bytes / 2**30)]
    return digest([key, technique, code, dict(config), num_devices, device, _versions(), TRIALS_VERSION], length=32)


@cache
def _versions() -> dict[str, str]:
    """Returns the versions of the libraries; cached, as it parses a file for each and every config needs it."""
    return {library: version(library) for library in LIBRARIES}


def technique_code(name: str, import_paths: tuple[str, ...]) -> str:
    """Returns the digest of a user's technique module; empty for built-in techniques, which the release covers."""
    return "" if name in registry.BUILTIN else source_digest(registry.dotted_path(name), import_paths)


def _adaptation(job: Job) -> dict[str, Any]:
    """Returns the parts of an adaptation that affect the speed: its kind and method, teacher, and number of parents."""
    said = job.adaptation
    if said is None:
        return {}
    how = {"kind": said.kind, "method": said.method, "trains": job.trains, "num_parents": len(job.parents)}
    return {"adaptation": {**how, "teacher": to_json(said.teacher_model)}}


def _scripts(command: Sequence[str] | None) -> dict[str, str]:
    """Returns the digest of each file that a command names: another training script has another speed."""
    files = [word for word in command or () if Path(word).is_file()]
    return {word: digest(Path(word).read_text(errors="replace")) for word in files}


def source_digest(dotted: str, import_paths: tuple[str, ...]) -> str:
    """Returns the digest of the module that holds a user's factory, without importing it; "" if it is not found."""
    top, *rest = dotted.partition(":")[0].split(".")
    spec = find_spec(top) or PathFinder.find_spec(top, import_paths)
    for part in rest:
        # The last part of the name alone: a dotted name would need parent packages that are not imported.
        folders = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(part, list(folders)) if folders else None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return ""
    return digest(Path(spec.origin).read_text(errors="replace"))
