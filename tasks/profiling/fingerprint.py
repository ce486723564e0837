"""What decides a job's speed, as a key: equal fingerprints, equal profiles, whatever the job is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ringmaster.techniques import registry
from ringmaster.techniques.job import Job
from ringmaster.techniques.values import digest, to_json

DATA_SHAPE = ("kind", "seq_len", "vocab_size", "num_labels", "image_size", "num_channels")
LIBRARIES = ("torch", "transformers")
TRIALS_VERSION = 2  # of the way trials measure: raised when new profiles would not be comparable with old ones


def speed_key(
    job: Job,
    data: Mapping[str, Any],
    *,
    facts: Mapping[str, Any] | None = None,
    import_paths: tuple[str, ...] = (),
) -> str:
    """A key that is equal for jobs that cannot differ in speed: same model shape, batch shape, precision and optimizer.

    data: the JSON form of the prepared data (its kind and shapes). facts: that of the model's facts, which tell two
    models apart that were saved under one name. import_paths: folders where users' factories are, whose source counts.
    """
    spec = job.data
    data_shape = {key: data[key] for key in DATA_SHAPE}
    factories = [name for name in (job.model.factory, job.loss, spec.factory) if name]
    # More data than one evaluation reads is no other speed: tomorrow's data must not be profiled anew.
    num_evaluated = min(data["num_held_out"], job.evaluation.max_batches * job.global_batch_size)
    return digest(
        {
            "model": to_json(job.model),
            "facts": dict(facts or {}),
            "adapter": to_json(job.adapter),
            "data": {**data_shape, "kwargs": to_json(spec.kwargs)},
            "loss": job.loss,
            "precision": [job.precision, job.communication, job.compile],
            "optimizer": [job.optimizer.name, sorted(job.optimizer.options)],
            "clips": job.clip_grad_norm is not None,
            "global_batch_size": job.global_batch_size,
            "exact": job.exact,  # which decides what configs there are
            "evaluation": [list(job.evaluation.metrics), num_evaluated],
            "sources": {name: source_digest(name, import_paths) for name in factories} | _scripts(job.model.command),
            **_adaptation(job),  # no key for a job without: what was measured of it stays known
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
    """The name under which a profile is kept: everything that matters, library versions and the kind of device too.

    memory_bytes: of a device: what ran out of memory may fit into more of it. code: digest of a user's own technique.
    """
    device = [device_kind, round(memory_bytes / 2**30)]
    return digest([key, technique, code, dict(config), num_devices, device, _versions(), TRIALS_VERSION], length=32)


@cache
def _versions() -> dict[str, str]:
    """Of the libraries; once a process, since each is parsed from a file and every config has a fingerprint."""
    return {library: version(library) for library in LIBRARIES}


def technique_code(name: str, import_paths: tuple[str, ...]) -> str:
    """The digest of the module of a user's technique; empty for our own, which come with the version."""
    return "" if name in registry.BUILTIN else source_digest(registry.dotted_path(name), import_paths)


def _adaptation(job: Job) -> dict[str, Any]:
    """What of an adaptation takes time: a teacher's model, masks of gradients, the way of rewriting so many models."""
    said = job.adaptation
    if said is None:
        return {}
    how = {"kind": said.kind, "method": said.method, "trains": job.trains, "num_parents": len(job.parents)}
    return {"adaptation": {**how, "teacher": to_json(said.teacher_model)}}


def _scripts(command: Sequence[str] | None) -> dict[str, str]:
    """The text of each file that a command names: another trainer has another speed."""
    files = [word for word in command or () if Path(word).is_file()]
    return {word: digest(Path(word).read_text(errors="replace")) for word in files}


def source_digest(dotted: str, import_paths: tuple[str, ...]) -> str:
    """The text of the module that a user's factory stands in: changed code is another speed. Imports nothing."""
    top, *rest = dotted.partition(":")[0].split(".")
    spec = find_spec(top) or PathFinder.find_spec(top, import_paths)
    for part in rest:
        # By its last name alone: a dotted one would ask for parents that are not imported.
        folders = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(part, list(folders)) if folders else None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return ""
    return digest(Path(spec.origin).read_text(errors="replace"))
