"""Validation of adapters: the keys of each kind, whether it goes with the model, and whether one can be continued."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ringmaster.findings import Finding, Raw, as_list, as_mapping, findings_where
from ringmaster.techniques.job_features import Effect, feature_kinds, is_black_box
from ringmaster.techniques.job_specs import ADAPTERS, CONTINUE, MERGE, VIRTUAL_TOKENS, Adapter
from ringmaster.techniques.models.architectures import architecture_in

DEFAULTS = {field.name: field.default for field in fields(Adapter)}
"""What the keys of an adapter are where they are not given."""
OF_KINDS = {
    "rank": ("lora",),
    "alpha": ("lora",),
    "rank_stabilised": ("lora",),
    "targets": ("lora", "ia3"),
    "feedforward": ("ia3",),
    "num_virtual_tokens": VIRTUAL_TOKENS,
    "dora": ("lora",),
    "dropout": ("lora",),
    "initialization": ("lora",),
    "modules_to_save": ("lora", "ia3"),
}
"""The kinds that have each key, for the keys that not all kinds have."""
CAUSAL = ("ForCausalLM", "LMHeadModel")


def base_findings(job: Raw, jobs: Mapping[str, Raw]) -> Iterator[Finding]:
    """Yields why a job cannot continue from the adapter of its base, or from that base with its adapter merged."""
    base, own, place = job.get("base"), as_mapping(job.get("adapter")), ("adapter", "base_adapter")
    of_base = _base_of(job, jobs)
    theirs, continues = of_base.get("adapter"), own.get("base_adapter") == CONTINUE
    if continues and own.get("from_pretrained") is not None:
        yield Finding(place, "'continue' excludes another adapter in from_pretrained", "leave one of the two out")
    elif not isinstance(theirs, Mapping):
        is_here = base is None or str(base) in jobs
        problem = (
            "is continue, and the base is not an adapter"
            if is_here
            else "is for the adapter of a job of the same batch"
        )
        remedy = (
            "leave it out, or name a base that is one"
            if is_here
            else "give the adapter's folder as from_pretrained, and what it is on as base; or merge it"
        )
        yield from findings_where((continues, place, problem, remedy))
    elif job.get("adapter") is None or own.get("base_adapter") == MERGE or own.get("from_pretrained") is not None:
        if (kind := theirs.get("kind")) in VIRTUAL_TOKENS:
            yield Finding(("base",), f"{base} trains a {kind}, which no weights can hold", f"take the base of {base}")
    else:
        yield from _continued_findings(job, of_base, jobs)


def _base_of(job: Raw, jobs: Mapping[str, Raw]) -> Raw:
    """Returns the job of the batch that a job continues from; nothing where it is none of them."""
    base = job.get("base")
    return jobs.get(base, {}) if isinstance(base, str) else {}


def _continued_findings(job: Raw, of_base: Raw, jobs: Mapping[str, Raw]) -> Iterator[Finding]:
    """Yields how a job differs from its base, whose adapter it continues."""
    base, own, first = job.get("base"), as_mapping(job.get("adapter")), of_base
    followed = {first["name"]}  # bases may go round in a circle, which is a fault of its own
    while (
        isinstance((below := _base_of(first, jobs)).get("adapter"), Mapping)
        and as_mapping(first["adapter"]).get("base_adapter") != MERGE
        and below["name"] not in followed
    ):
        first = below
        followed.add(first["name"])
    theirs = as_mapping(first["adapter"])  # of the job that begins the adapter
    model, model_of_base = as_mapping(job.get("model")), as_mapping(of_base.get("model"))
    is_same_class = model.get("architecture") == model_of_base.get("architecture")  # others are faults of any base
    problem = f"is not that of {base}, whose adapter is continued"
    yield from findings_where(
        (model != model_of_base and is_same_class, ("model",), problem, f"take the model of {base}"),
        *(
            (job.get(key) != of_base.get(key), (key,), problem, f"take that of {base}")
            for key, kind in feature_kinds().items()
            if Effect.MODEL in kind.effects
        ),
    )
    for key, default in DEFAULTS.items():
        given, other = (_as_set(adapter.get(key, default)) for adapter in (own, theirs))
        if key not in ("from_pretrained", "base_adapter") and given not in (_as_set(default), other):
            yield Finding(
                ("adapter", key),
                f"is {own[key]!r}, and the adapter of {base}, which is continued, has another",
                f"leave {key} out; or set base_adapter: merge, for a new one",
            )


def _as_set(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, (list, tuple)) else value


def adapter_findings(job: Raw) -> Iterator[Finding]:
    """Yields the faults in the adapter of one job; places are relative to the job."""
    adapter = job.get("adapter")
    if not isinstance(adapter, Mapping):
        return
    kind, is_new = str(adapter.get("kind", Adapter.kind)), adapter.get("from_pretrained") is None
    if not is_new and adapter.get("initialization") not in (None, "default"):
        yield Finding(("adapter", "initialization"), "is for a new adapter", "leave it out: the folder has the values")
    if kind in ADAPTERS and is_new:
        yield from _of_other_kinds(adapter, kind)
    if isinstance(model := job.get("model"), Mapping):
        yield from _on_model(job, model, kind)
    if job.get("adaptation") is not None:
        remedy = "train the adapter in a job of its own, and adapt its result"
        yield Finding(("adapter",), "cannot be combined with an adaptation", remedy)


def _of_other_kinds(adapter: Raw, kind: str) -> Iterator[Finding]:
    for key, kinds in OF_KINDS.items():
        given = adapter.get(key)
        given = tuple(given) if isinstance(given, list) else given
        if kind not in kinds and given is not None and given != DEFAULTS[key]:
            yield Finding(("adapter", key), f"is for {' and '.join(kinds)}, and this one is {kind}", f"remove {key}")
    targets, scaled = adapter.get("targets"), as_list(adapter.get("feedforward"))
    if kind == "ia3" and isinstance(targets, list):
        yield from findings_where(
            *(
                (
                    isinstance(name, str) and name not in targets,
                    ("adapter", "feedforward", i),
                    f"{name!r} is not a target",
                    "name it among targets too",
                )
                for i, name in enumerate(scaled)
            )
        )


def _on_model(job: Raw, model: Raw, kind: str) -> Iterator[Finding]:
    is_opaque, is_built = is_black_box(job), bool(set(model) & {"architecture", "factory"})
    named, folder = model.get("architecture"), model.get("from_pretrained")
    # None where neither the file nor a local folder gives the class.
    architecture = (
        named if isinstance(named, str) else architecture_in(Path(folder)) if isinstance(folder, str) else None
    )
    is_causal = architecture is None or architecture.endswith(CAUSAL)
    yield from findings_where(
        (is_opaque, ("adapter",), "does not go with a command", "hand it to the command as kwargs"),
        (
            not is_opaque and job.get("base") is None and folder is None and is_built,
            ("adapter",),
            "has no base: the weights that it leaves alone would be random ones",
            "give a base, or a model by from_pretrained; or leave the adapter out to train every weight",
        ),
        (
            not is_opaque and kind in VIRTUAL_TOKENS and not is_causal,
            ("adapter", "kind"),
            f"{kind} is for causal language models, and the model is {architecture}",
            "take lora",
        ),
    )
