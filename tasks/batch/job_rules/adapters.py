"""Validation of adapters: the keys of each kind, and the requirements on model and base."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ringmaster.tasks.batch.faults import Finding
from ringmaster.tasks.batch.references import closest
from ringmaster.techniques.job import ADAPTERS, Adapter
from ringmaster.techniques.models.architectures import architecture_in, attribute_names, linear_names

Raw = Mapping[str, Any]

OF_KINDS = {
    "rank": ("lora",),
    "alpha": ("lora",),
    "rank_stabilised": ("lora",),
    "targets": ("lora", "ia3"),
    "feedforward": ("ia3",),
    "num_virtual_tokens": ("prefix",),
    "modules_to_save": ("lora", "ia3"),
}
"""The kinds that have each key, for the keys that not all kinds have."""
DEFAULTS = {field.name: field.default for field in fields(Adapter)}
CAUSAL = ("ForCausalLM", "LMHeadModel")


def adapter_findings(job: Raw) -> Iterator[Finding]:
    """Yields the faults in the adapter of one job; places are relative to the job."""
    said = job.get("adapter")
    if not isinstance(said, Mapping):
        return
    kind = said.get("kind", Adapter.kind)
    if kind in ADAPTERS and said.get("from_pretrained") is None:
        yield from _of_other_kinds(said, str(kind))
    yield from _on_model(job, said, str(kind))
    if job.get("adaptation") is not None:
        yield Finding(
            ("adapter",), "stands beside an adaptation", "train the adapter in a job of its own, and adapt its result"
        )


def base_findings(job: Raw, jobs: Mapping[str, Raw]) -> Iterator[Finding]:
    """Yields a fault if the base of a job is a job of the batch that trains an adapter."""
    base = job.get("base")
    if not isinstance(base, str) or not isinstance(jobs.get(base, {}).get("adapter"), Mapping):
        return
    yield Finding(
        ("base",),
        f"{base} trains an adapter, which is no whole model",
        f"take the base of {base}; to go on from its adapter, give it as adapter.from_pretrained",
    )


def _of_other_kinds(said: Raw, kind: str) -> Iterator[Finding]:
    for key, kinds in OF_KINDS.items():
        given = said.get(key)
        given = tuple(given) if isinstance(given, list) else given
        if kind not in kinds and given is not None and given != DEFAULTS[key]:
            yield Finding(("adapter", key), f"is for {' and '.join(kinds)}, and this one is {kind}", f"remove {key}")
    targets, scaled = said.get("targets"), said.get("feedforward")
    if kind == "ia3" and isinstance(scaled, list) and isinstance(targets, list):
        known = {name for name in targets if isinstance(name, str)}
        for i, name in enumerate(scaled):
            if isinstance(name, str) and name not in known:
                yield Finding(("adapter", "feedforward", i), f"{name!r} is no target", "name it among targets too")


def _on_model(job: Raw, said: Raw, kind: str) -> Iterator[Finding]:
    model = job.get("model")
    if not isinstance(model, Mapping):
        return
    if model.get("command") is not None:
        yield Finding(("adapter",), "does not go with a command", "hand it to the command as kwargs")
        return
    if job.get("base") is None and model.get("from_pretrained") is None and set(model) & {"architecture", "factory"}:
        yield Finding(
            ("adapter",),
            "has no base: the weights that it leaves alone would be random ones",
            "give a base, or a model by from_pretrained; or leave the adapter out to train every weight",
        )
    architecture = _architecture(model)
    if architecture is None:
        return
    if kind == "prefix" and not architecture.endswith(CAUSAL):
        yield Finding(
            ("adapter", "kind"), f"prefix is for causal language models, and the model is {architecture}", "take lora"
        )
    known, attributes = linear_names(architecture), attribute_names(architecture)
    for key in ("targets", "feedforward"):
        for i, name in enumerate(said[key] if isinstance(said.get(key), list) else []):
            last = str(name).rpartition(".")[2]
            if attributes and not last.isdigit() and last not in attributes:
                remedy = closest(last, known or attributes, what="Its linear modules are")
                yield Finding(("adapter", key, i), f"no module of {architecture} is named {name!r}", remedy)


def _architecture(model: Raw) -> str | None:
    """Returns the class of a model, or None if neither the file nor a local folder gives it."""
    named, folder = model.get("architecture"), model.get("from_pretrained")
    if isinstance(named, str):
        return named
    return architecture_in(Path(folder)) if isinstance(folder, str) else None
