"""Validation rules between several values of a batch: exclusions, requirements and references.

The rules work on plain mappings, so that a fault elsewhere in a job does not hide theirs. Those of parents are in
`parent_rules`, those of adapters in `adapter_rules`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from ringmaster.findings import Finding, Location, Raw, are_counts, as_list, as_mapping, findings_where, got
from ringmaster.tasks.batch import adapter_rules, parent_rules
from ringmaster.tasks.batch.file_hooks import PlacedJob, file_hooks
from ringmaster.tasks.batch.references import closest, split_loss
from ringmaster.tasks.batch.schema import Data, JobEntry, misspelt
from ringmaster.tasks.batch.sections import Section, section_of
from ringmaster.techniques.data.file_rows import moment
from ringmaster.techniques.job import PRUNED, Job, is_rewriting
from ringmaster.techniques.job_features import feature_kinds, is_black_box, product_of
from ringmaster.techniques.job_specs import (
    ATTENTIONS,
    DECAY_RATIO,
    OPTIMIZER_OPTIONS,
    SCHEDULES,
    ModelSpec,
    OptimizerSpec,
    ScheduleSpec,
)
from ringmaster.techniques.loss import loss_class, loss_function, loss_names, option_faults, options_of

SIZES = frozenset(
    (
        *("hidden_size", "embedding_size", "d_model", "n_embd", "head_dim", "intermediate_size", "vocab_size"),
        *("num_attention_heads", "num_key_value_heads", "n_head", "encoder_attention_heads", "decoder_attention_heads"),
        *("encoder_ffn_dim", "decoder_ffn_dim", "image_size", "patch_size", "num_channels"),
    )
)
"""Fields of configs of transformers that are sizes of tensors."""


def job_findings(raw: Any) -> Iterator[Finding]:
    """Yields the faults between the values of one job; places are relative to the job."""
    job = as_mapping(raw)
    yield from not_finite(job, place=())
    yield from chain.from_iterable(rule(job) for rule in JOB_CHECKS)


def batch_findings(jobs: Sequence[PlacedJob]) -> Iterator[Finding]:
    """Yields the faults between the jobs of a batch; places are relative to the batch."""
    named = [(place, job) for place, raw in jobs if isinstance((job := as_mapping(raw)).get("name"), str)]
    first: dict[str, Raw] = {}
    for place, job in named:
        if first.setdefault(job["name"], job) is not job:
            message = f"{job['name']!r} is the name of another job already"
            yield Finding(place(("name",)), message, "give every job a name of its own")
    circles = parent_rules.circles_of(first)
    for place, job in named:
        for each in parent_rules.parents_of(job):
            yield from parent_rules.parent_findings(place(each.place), job, each, jobs=first, circles=circles)
        yield from (replace(finding, place=place(finding.place)) for finding in adapter_rules.base_findings(job, first))


def _one_of(
    job: Raw, name: str, keys: Sequence[str], *, section: type[Section], unless: str | None = None
) -> Iterator[Finding]:
    """Yields a fault unless exactly one of `keys` is given in the section `name`, or none with the key `unless`."""
    raw, remedy = job.get(name), f"give exactly one of {', '.join(keys)}"
    if not isinstance(raw, Mapping):
        return
    given = [key for key in keys if raw.get(key) is not None]
    is_missing = not given and raw.get(unless) is None and not misspelt(raw, section) & set(keys)
    yield from findings_where(
        (len(given) > 1, (name,), f"has {' and '.join(given)}", remedy),
        (is_missing, (name,), "has no source", remedy),
    )


def _sources(job: Raw) -> Iterator[Finding]:
    """Yields why it is not plain where a model or data come from.

    The weights of one model may go into another architecture. Where a path is given, a data set's name is only a label.
    """
    model, data = as_mapping(job.get("model")), as_mapping(job.get("data"))
    models = ("architecture",) if model.get("from_pretrained") is None else ()
    yield from _one_of(job, "model", (*models, "from_pretrained", "factory", "command"), section=section_of(ModelSpec))
    names = ("name",) if data.get("path") is None else ()
    yield from _one_of(job, "data", ("source", "path", "dataset", "factory", *names), section=Data, unless="kind")


def _files(job: Raw) -> Iterator[Finding]:
    """Yields faults of keys that need files or a data set's name, and of windows that are not of exactly one kind."""
    data = as_mapping(job.get("data"))
    window, has_files = as_mapping(data.get("window")), data.get("path") is not None or data.get("name") is not None
    given = [key for key in ("last_days", "last_rows") if window.get(key) is not None]
    given += ["since and until"] if window.get("since") is not None or window.get("until") is not None else []
    yield from findings_where(
        *(
            (
                data.get(key) is not None and not has_files,
                ("data", key),
                "goes with files",
                "give the name of a data set, or a path; or remove it",
            )
            for key in ("version", "window", "held_out_path", "format", "time_column")
        ),
        (
            isinstance(data.get("window"), Mapping) and len(given) != 1,
            ("data", "window"),
            f"has {' and '.join(given) or 'nothing'}",
            "give one of last_days, last_rows, and since with until",
        ),
    )
    for key in ("since", "until"):
        try:
            moment(window.get(key), 0.0)
        except ValueError as error:
            message, _, remedy = str(error).partition(": ")
            yield Finding(("data", "window", key), message, remedy or "write it as 2026-01-31")


def _arguments(job: Raw) -> Iterator[Finding]:
    for name, takers in (("model", ("factory", "command")), ("data", ("factory", "dataset", "kind"))):
        section = as_mapping(job.get(name))
        has_rows = section.get("path") is not None or section.get("name") is not None  # whose kind may be inferred
        if section.get("kwargs") and not has_rows and all(section.get(taker) is None for taker in takers):
            problem = f"are arguments for no {' or '.join(takers)}"
            yield Finding((name, "kwargs"), problem, f"give a {takers[0]} too, or remove kwargs")
    yield from _command(job, as_mapping(job.get("model")))
    yield from _attention(job, as_mapping(job.get("model")))


def _attention(job: Raw, model: Raw) -> Iterator[Finding]:
    chosen, place = model.get("attention", ModelSpec.attention), ("model", "attention")
    if chosen == ModelSpec.attention or chosen not in ATTENTIONS:
        return
    yield from findings_where(
        (
            model.get("factory") is not None or is_black_box(job),
            place,
            "is chosen for Hugging Face's models",
            "leave it out: what is built there chooses",
        ),
        (
            "attn_implementation" in as_mapping(model.get("config")),
            place,
            "is set in config.attn_implementation too",
            "leave one of the two out",
        ),
        (
            chosen == "flash" and job.get("precision", Job.precision) == "fp32",
            place,
            "flash computes in bf16 only",
            "set precision to bf16, or attention to sdpa",
        ),
    )


def _command(job: Raw, model: Raw) -> Iterator[Finding]:
    is_command, reads_its_own = is_black_box(job), as_mapping(job.get("data")).get("source") == "command"
    yield from findings_where(
        *(
            (
                model.get("config") and model.get(taker) is not None,
                ("model", "config"),
                f"does not go with a {taker}",
                f"hand the values to the {taker} as kwargs",
            )
            for taker in ("factory", "command")
        ),
        (
            model.get("configs") and not is_command,
            ("model", "configs"),
            "are for a command",
            "give a command too, or remove configs",
        ),
        (
            model.get("adopt") and not is_command,
            ("model", "adopt"),
            "is for a command",
            "give the command that runs the script",
        ),
        (
            reads_its_own and not is_command,
            ("data", "source"),
            "is not a built-in kind of data",
            "name other data, or a command as the model",
        ),
        (
            reads_its_own and job.get("num_epochs") is not None,
            ("num_epochs",),
            "cannot be counted in data that only the command knows",
            "give num_steps",
        ),
    )


def _length(job: Raw) -> Iterator[Finding]:
    if is_rewriting(job):
        return
    steps, epochs = job.get("num_steps"), job.get("num_epochs")
    fewest = 0 if as_mapping(job.get("adaptation")).get("kind") == PRUNED else 1
    yield from findings_where(
        (
            isinstance(steps, int) and not isinstance(steps, bool) and steps < fewest,
            ("num_steps",),
            f"must be at least {fewest}, {got(steps)}",
            "give the number of optimizer steps, such as 60",
        ),
        (
            steps is None
            and epochs is None
            and not product_of(job)
            and not misspelt(job, JobEntry) & {"num_steps", "num_epochs"},
            ("num_steps",),
            "is missing",
            "give num_steps, such as 60, or num_epochs, such as 3",
        ),
        (
            steps is not None and epochs is not None,
            ("num_epochs",),
            "cannot be combined with num_steps",
            "give one of the two",
        ),
    )


def _evaluation(job: Raw) -> Iterator[Finding]:
    """Yields two limits, and the steps after the job's last one; places are relative to the job."""
    num_steps, evaluation = job.get("num_steps"), as_mapping(job.get("evaluation"))
    if evaluation.get("max_batches") is not None and evaluation.get("max_rows") is not None:
        yield Finding(("evaluation", "max_batches"), "cannot be used with max_rows", "give max_rows alone")
    for i, step in enumerate(as_list(evaluation.get("at_steps"))):  # every_steps may be longer: the last step counts
        yield from findings_where(
            (
                are_counts(num_steps, step) and step > num_steps,
                ("evaluation", "at_steps", i),
                f"is {step}, and the job has {num_steps} steps",
                "give an earlier one, or raise num_steps",
            )
        )


def _config_sizes(job: Raw) -> Iterator[Finding]:
    """Yields the sizes below 1 in the model's config, nested ones too; places are relative to the job."""
    waiting: list[tuple[Location, Any]] = [(("model", "config"), as_mapping(job.get("model")).get("config"))]
    for place, value in waiting:
        waiting += [((*place, key), item) for key, item in as_mapping(value).items()]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and value < 1 and place[-1] in SIZES:
            yield Finding(place, f"must be at least 1, {got(value)}", "give a size, such as 64, or leave it out")


def _exact(job: Raw) -> Iterator[Finding]:
    chunk, size = job.get("exact_chunk"), job.get("global_batch_size", Job.global_batch_size)
    workers = as_mapping(job.get("local_updates")).get("workers")
    if chunk is not None and job.get("exact") is not True and workers is None:
        yield Finding(("exact_chunk",), "goes with exact: true", "set exact: true, or leave exact_chunk out")
    elif isinstance(chunk, int) and are_counts(chunk, size):
        what = f"global_batch_size {size}"
        if are_counts(workers):
            size //= workers
            what = f"a worker's {size} samples"
        if size % chunk or (size // chunk).bit_count() != 1:
            problem = f"divides {what} into a number of chunks that is not a power of two"
            yield Finding(("exact_chunk",), problem, f"give {size} divided by 1, 2, 4, 8 or so")


def _features(job: Raw) -> Iterator[Finding]:
    """Yields the faults that optional features find; places are relative to the job."""
    for kind in dict.fromkeys(feature_kinds().values()):
        yield from kind.findings(job)


def _file_hooks(job: Raw) -> Iterator[Finding]:
    """Yields the faults that optional features find between keys of files; places are relative to the job."""
    for hook in file_hooks():
        yield from hook.job_findings(job)


def _text(job: Raw) -> Iterator[Finding]:
    data = as_mapping(job.get("data"))
    if data.get("seq_len") is None and (
        data.get("source") == "python-stdlib"
        or (data.get("kind") in (None, "text", "language-modeling") and str(data.get("path")).endswith(".txt"))
    ):
        yield Finding(("data", "seq_len"), "is missing", "give the number of tokens of a sample of text, such as 128")


def _loss(job: Raw) -> Iterator[Finding]:
    """Yields the faults of a loss's options, and of what it does not go with; places are relative to the job."""
    name, options = split_loss(job.get("loss"))
    if not isinstance(name, str) or name not in loss_names() or (loss_type := loss_class(name)) is None:
        return  # the schema has reported it
    known = options_of(loss_type)
    faults = list(option_faults(loss_type, options))
    for fault in faults:
        if fault.option in known:
            problem, remedy = fault.problem, fault.remedy
        else:
            problem = f"is not an option of {name}"
            remedy = closest(fault.option, known, what="The options are") if known else "remove it: there are none"
        yield Finding(("loss", fault.option), problem, remedy)
    yield from findings_where(
        (
            not faults
            and job.get("global_batch_size") == 1
            and (function := loss_function(name, options)) is not None
            and function.min_rows > 1,
            ("global_batch_size",),
            f"is 1, and the loss {name} compares each row of a step with another one",
            "give 2 or more, or another loss or loss_type",
        ),
        (
            loss_type.needs_reference and not loss_type.needs_teacher and job.get("adaptation") is not None,
            ("loss",),
            f"{name} compares with the weights that the job begins with, which an adaptation changes",
            "leave the adaptation out, or give another loss",
        ),
    )


def not_finite(value: Any, *, place: Location) -> Iterator[Finding]:
    """Yields the infinite numbers at and below a place, and those that are not a number."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from not_finite(item, place=(*place, key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from not_finite(item, place=(*place, i))
    elif isinstance(value, float) and not math.isfinite(value):
        yield Finding(place, f"must be a finite number, {got(value)}", "give a finite number")


def training_findings(job: Raw) -> Iterator[Finding]:
    """Yields the faults in the optimizer, the schedule and `freeze` of one job; places are relative to the job."""
    optimizer, schedule, steps = as_mapping(job.get("optimizer")), as_mapping(job.get("schedule")), job.get("num_steps")
    name, decay = schedule.get("name", ScheduleSpec.name), schedule.get("decay_ratio")
    warmup, warmup_ratio, length = (schedule.get(key) for key in ("warmup_steps", "warmup_ratio", "num_steps"))
    total_ratio = _number(warmup_ratio) + _number(DECAY_RATIO if decay is None else decay)
    yield from findings_where(
        (
            isinstance(warmup, int) and isinstance(steps, int) and 0 < steps <= warmup,
            ("schedule", "warmup_steps"),
            f"must be less than the {steps} steps of the job, {got(warmup)}",
            "warm up for fewer steps",
        ),
        (
            isinstance(length, int) and isinstance(steps, int) and 0 < length < steps,
            ("schedule", "num_steps"),
            f"must be at least the {steps} steps of the job, which is a part of them, {got(length)}",
            "give all steps of the schedule, or leave it out",
        ),
        (
            warmup and warmup_ratio is not None,
            ("schedule", "warmup_ratio"),
            "cannot be combined with warmup_steps",
            "give one of the two",
        ),
        (
            name == "constant" and schedule.get("min_lr_ratio"),
            ("schedule", "min_lr_ratio"),
            "is where a decay ends, and a constant schedule has none",
            "name the schedule linear, cosine or wsd, or remove it",
        ),
        (
            name != "wsd" and name in SCHEDULES and decay is not None,
            ("schedule", "decay_ratio"),
            f"is for wsd, and this schedule is {name}",
            "name the schedule wsd, or remove it",
        ),
        (
            name == "wsd" and total_ratio > 1 and warmup_ratio is not None,
            ("schedule", "warmup_ratio"),
            f"and decay_ratio are more than all steps together, {got(total_ratio)}",
            "give shares whose sum is at most 1",
        ),
        (
            as_mapping(job.get("adaptation")).get("kind") == PRUNED and optimizer.get("name") == "muon",
            ("optimizer", "name"),
            "muon moves weights whose gradient is zero, and this job keeps pruned ones at zero",
            "take adamw",
        ),
        (
            job.get("freeze") and job.get("adapter") is not None,
            ("freeze",),
            "cannot be combined with an adapter, which freezes all weights already",
            "leave one of the two out",
        ),
        (
            job.get("freeze") and is_black_box(job),
            ("freeze",),
            "names parameters of a model that only its command knows",
            "leave it out: the command chooses what it trains",
        ),
        (
            job.get("freeze") and is_rewriting(job),
            ("freeze",),
            "cannot be combined with an adaptation that trains nothing",
            "leave it out",
        ),
    )
    yield from _optimizer_options(optimizer.get("name", OptimizerSpec.name), as_mapping(optimizer.get("options")))


def _optimizer_options(name: Any, options: Raw) -> Iterator[Finding]:
    known = OPTIMIZER_OPTIONS.get(name) if isinstance(name, str) else None
    if known is None:
        return
    place = ("optimizer", "options")
    for option, value in options.items():
        if option not in known:
            remedy = closest(option, known, what="The options are")
            yield Finding((*place, option), "is an unknown option", remedy)
        elif not known[option].fits(value):
            problem = f"must be {known[option].words}, got {value!r:.60}"
            yield Finding((*place, option), problem, "change it, or leave it out for the default")
    if options.get("nesterov") is True and not options.get("momentum", 0.95 * (name == "muon")):
        yield Finding((*place, "nesterov"), "needs momentum", "give momentum, such as 0.9")


def _number(value: Any) -> float:
    """Returns a number, or 0 in place of what is none, which the schema refuses."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0


JOB_CHECKS: Sequence[Callable[[Raw], Iterator[Finding]]] = (
    _sources,
    _files,
    _arguments,
    _length,
    _evaluation,
    _config_sizes,
    _exact,
    _features,
    _text,
    training_findings,
    _loss,
    _file_hooks,  # a feature that takes no adapter says so before the adapter's own faults
    adapter_rules.adapter_findings,
)
"""Of several faults at one place, the first is reported."""
