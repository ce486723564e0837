"""Validation rules between several values of a batch: exclusions, requirements and references.

The rules work on plain mappings, so that a fault elsewhere in a job does not hide theirs. Those of adaptations and
adapters are in `adaptation_rules`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ringmaster.extras import missing_extra
from ringmaster.tasks.batch.adaptation_rules import (
    adaptation_findings,
    adapter_findings,
    base_findings,
    circles_of,
    is_rewriting,
    is_store,
    may_have_no_steps,
    parent_findings,
    parents_of,
)
from ringmaster.tasks.batch.document import Finding, Place, as_list, as_mapping, findings_where, got
from ringmaster.tasks.batch.references import closest, loss_parts
from ringmaster.tasks.batch.schema import Data, JobEntry, ModelSection, Section, misspelt
from ringmaster.tasks.planning.objectives import TIME_TO_TARGET
from ringmaster.techniques.checkpoints.checkpoint import folder_of
from ringmaster.techniques.checkpoints.storage import place_of
from ringmaster.techniques.data.file_rows import moment
from ringmaster.techniques.job import (
    ATTENTIONS,
    DECAY_RATIO,
    LEAST_SEARCH_STEPS,
    MEASURED_OPTIMIZERS,
    OPTIMIZER_OPTIONS,
    PRUNED,
    SCHEDULES,
    EvaluationSpec,
    Job,
    LocalUpdates,
    ModelSpec,
    OptimizerSpec,
    ScheduleSpec,
)
from ringmaster.techniques.local import Local
from ringmaster.techniques.loss import is_named, loss_class, loss_names, option_faults, options_of

Raw = Mapping[str, Any]
PlacedJob = tuple[Callable[[Place], Place], Any]
"""A job's plain values, and a function that maps a place in the job to its place in the batch."""


def job_findings(raw: Any) -> Iterator[Finding]:
    """Yields the faults between the values of one job; places are relative to the job."""
    job = as_mapping(raw)
    yield from not_finite(job, place=())
    yield from _one_of(job, "model", _models(job), section=ModelSection)
    yield from _one_of(job, "data", ("source", "path", "dataset", "factory", *_name(job)), section=Data, unless="kind")
    yield from _files(job)
    yield from _arguments(job)
    yield from _length(job)
    yield from _exact(job)
    yield from _local_updates(job)
    yield from _untrusted(job)
    yield from _text(job)
    yield from training_findings(job)
    yield from _loss(job)
    yield from adaptation_findings(job)
    yield from adapter_findings(job)
    yield from _store(job)
    yield from _warm_start(job)
    yield from _target(job)
    yield from _variables(job)


def _store(job: Raw) -> Iterator[Finding]:
    """Yields why a job makes no knowledge store; places are relative to the job."""
    if not is_store(job):
        return
    model, data = as_mapping(job.get("model")), as_mapping(job.get("data"))
    problem, _, remedy = (missing_extra("retrieval", feature="a store") or "").partition(". To fix: ")
    trains = ("adapter", "adaptation", "loss", "target", "warm_start", "local_updates", "numerics", "allow_untrusted")
    yield from findings_where(
        (problem, ("store",), problem, remedy),
        (
            job.get("base") is None and model.get("from_pretrained") is None,
            ("base",),
            "is missing: passages are encoded by a model that has been trained",
            "give a job's name, models:/NAME@ALIAS or a folder; or model.from_pretrained",
        ),
        (data.get("path") is None and data.get("name") is None, ("data",), "has no files of passages", "give a path"),
        *((job.get(key), (key,), "is for training, and a store trains nothing", f"remove {key}") for key in trains),
    )


def _target(job: Raw) -> Iterator[Finding]:
    """Yields why a job cannot end at its target; places are relative to the job."""
    target, evaluation = job.get("target"), as_mapping(job.get("evaluation"))
    if not isinstance(target, Mapping):
        return
    if len([key for key in ("at_most", "at_least") if target.get(key) is not None]) != 1:
        yield Finding(("target",), "does not say one bound", "give one of at_most and at_least")
    metric, metrics = target.get("metric"), evaluation.get("metrics", EvaluationSpec.metrics)
    if isinstance(metric, str) and isinstance(metrics, (list, tuple)) and metric.removeprefix("eval/") not in metrics:
        yield Finding(("target", "metric"), f"{metric} is not evaluated", "name it in evaluation.metrics too")
    if not evaluation.get("every_steps") and not evaluation.get("at_steps"):
        remedy = "give evaluation.every_steps, such as 50"
        yield Finding(("target",), "is looked for in evaluations on the way, and there are none", remedy)
    if as_mapping(job.get("model")).get("command") is not None:
        yield Finding(("target",), "is for jobs that Ringmaster trains, not for commands", "leave it out")
    if is_rewriting(job):
        yield Finding(("target",), "stands beside an adaptation that trains nothing", "leave it out")


def _variables(job: Raw) -> Iterator[Finding]:
    """Yields why what a job lists under `may_vary` cannot be chosen; places are relative to the job."""
    variables, place = job.get("may_vary"), ("may_vary",)
    if not isinstance(variables, Mapping):
        return
    if job.get("target") is None:
        yield Finding(place, "is chosen on the way to a target, and there is none", "give a target, or leave it out")
    if job.get("exact"):
        yield Finding(("exact",), "fixes all bits, and what may_vary lists changes them", "leave one of the two out")
    if job.get("local_updates") is not None:
        problem = "has an exchange every few steps, in which no batch size may vary"
        yield Finding(("local_updates",), problem, "leave it out, or may_vary")
    if job.get("warm_start") is not None:
        problem = "passes over the first steps, by which may_vary is decided"
        yield Finding(("warm_start",), problem, "leave one of the two out")
    if as_mapping(job.get("data")).get("kind") == "prompt":
        problem = "is prompt, and a job that trains on what it generates may not vary"
        yield Finding(("data", "kind"), problem, "leave may_vary out")
    for path, default in (
        (("global_batch_size",), Job.global_batch_size),
        (("precision",), Job.precision),
        (("optimizer", "lr"), OptimizerSpec.lr),
    ):
        key, section = path[-1], as_mapping(job.get(path[0])) if path[1:] else job
        values, own = variables.get(key), section.get(key, default)
        if isinstance(values, list) and values and own not in values:
            yield Finding((*place, key), f"lacks the job's own {own}", f"add {own}, or set {key} to one of the list")
    yield from _exchanges(job, variables)
    num_steps = job.get("num_steps")
    if variables.get("lr") and not (isinstance(num_steps, int) and num_steps > LEAST_SEARCH_STEPS):
        problem = f"is compared after {LEAST_SEARCH_STEPS} steps at the least, of num_steps"
        yield Finding((*place, "lr"), problem, "give num_steps, more than that, or leave it out")
    if not isinstance(variables.get("global_batch_size"), list) or len(variables["global_batch_size"]) < 2:
        return
    name = as_mapping(job.get("optimizer")).get("name", OptimizerSpec.name)
    if name not in MEASURED_OPTIMIZERS:
        problem = f"needs the noise scale, which is measured with {' and '.join(MEASURED_OPTIMIZERS)}, not {name}"
        yield Finding((*place, "global_batch_size"), problem, "take one of these optimizers, or leave it out")
    if as_mapping(job.get("data")).get("sampling") == "length-grouped":
        problem = "does not go with length-grouped sampling, whose groups depend on the batch size"
        yield Finding((*place, "global_batch_size"), problem, "set data.sampling: random, or leave it out")


def _exchanges(job: Raw, variables: Raw) -> Iterator[Finding]:
    """Yields why local updates cannot be chosen for a job; places are relative to the job."""
    place, workers, techniques = ("may_vary", "sync_every"), variables.get("workers"), job.get("techniques")
    values = as_list(variables.get("sync_every"))
    size = job.get("global_batch_size", Job.global_batch_size)
    yield from findings_where(
        (
            bool(values) and 1 not in values,
            place,
            "lacks 1, an exchange at each step, with which every job begins",
            "add 1",
        ),
        (
            bool(values) and job.get("numerics") is not None,
            place,
            "does not go with numerics, as local updates have the same bits everywhere",
            "leave one of the two out",
        ),
        (
            bool(values) and isinstance(techniques, list) and Local.name not in techniques,
            place,
            f"takes the technique {Local.name}, which techniques leaves out",
            f"add {Local.name} to techniques, or leave it out",
        ),
        (
            workers is not None and not values,
            ("may_vary", "workers"),
            "are those of local updates, which nothing permits",
            "give sync_every, or leave it out",
        ),
        (
            _are_counts(size, workers) and size % workers > 0,
            ("may_vary", "workers"),
            f"is {workers}, and global_batch_size {size} cannot be divided by it",
            "give a number that divides it",
        ),
    )


def objective_findings(objective: Any, jobs: Sequence[PlacedJob]) -> Iterator[Finding]:
    """Yields the faults between the objective and what jobs list under `may_vary`; places are relative to the batch."""
    entries = [(place, as_mapping(raw)) for place, raw in jobs]
    if objective == TIME_TO_TARGET and not any(job.get("target") is not None for _, job in entries):
        yield Finding(("objective",), "is time-to-target, and no job has a target", "give a job a target")
    for place, job in entries:
        if job.get("may_vary") is not None and objective != TIME_TO_TARGET:
            problem = "is chosen for the objective time-to-target alone"
            yield Finding(place(("may_vary",)), problem, f"set objective: {TIME_TO_TARGET}, or leave it out")


def _warm_start(job: Raw) -> Iterator[Finding]:
    """Yields why a job cannot go on from a checkpoint of another one."""
    start, num_steps = as_mapping(job.get("warm_start")), job.get("num_steps")
    root, step = start.get("checkpoints"), start.get("step")
    if not isinstance(root, str) or not isinstance(step, int):
        return
    place = ("warm_start", "step")
    yield from findings_where(
        (
            as_mapping(job.get("model")).get("command") is not None,
            ("warm_start",),
            "is for jobs that Ringmaster trains, not for commands",
            "leave it out",
        ),
        (
            isinstance(num_steps, int) and step >= num_steps,
            place,
            f"is {step}, and the job has {num_steps} steps",
            "take an earlier one, or raise num_steps",
        ),
    )
    try:
        names = place_of(root).names()
    except (OSError, ValueError) as error:
        yield Finding(("warm_start", "checkpoints"), f"cannot be read: {error}", "check the folder or URL")
        return
    if folder_of(step) not in names:
        there = ", ".join(str(int(name.rpartition("-")[2])) for name in names) or "none"
        yield Finding(place, f"is {step}, of which {root} has no checkpoint", f"name one that is there: {there}")


def batch_findings(jobs: Sequence[PlacedJob]) -> Iterator[Finding]:
    """Yields the faults between the jobs of a batch; places are relative to the batch."""
    named = [(place, job) for place, raw in jobs if isinstance((job := as_mapping(raw)).get("name"), str)]
    first: dict[str, Raw] = {}
    for place, job in named:
        if job["name"] in first:
            message = f"{job['name']!r} is the name of another job already"
            yield Finding(place(("name",)), message, "give every job a name of its own")
        else:
            first[job["name"]] = job
    circles = circles_of(first)
    for place, job in named:
        for key, parent in parents_of(job):
            yield from parent_findings(place(key), job, key=key, parent=parent, jobs=first, circles=circles)
        for finding in base_findings(job, first):
            yield replace(finding, place=place(finding.place))


def _one_of(
    job: Raw, name: str, keys: Sequence[str], *, section: type[Section], unless: str | None = None
) -> Iterator[Finding]:
    """Yields a fault unless exactly one of `keys` is given in the section `name`, or none with the key `unless`."""
    raw = job.get(name)
    if not isinstance(raw, Mapping):
        return
    given = [key for key in keys if raw.get(key) is not None]
    remedy = f"give exactly one of {', '.join(keys)}"
    if len(given) > 1:
        yield Finding((name,), f"has {' and '.join(given)}", remedy)
    elif not given and raw.get(unless) is None and not misspelt(raw, section) & set(keys):
        yield Finding((name,), "does not say where it comes from", remedy)


def _models(job: Raw) -> tuple[str, ...]:
    """Returns the sources of a model that exclude each other; the weights of one may go into another architecture."""
    has_weights = as_mapping(job.get("model")).get("from_pretrained") is not None
    return (*(() if has_weights else ("architecture",)), "from_pretrained", "factory", "command")


def _name(job: Raw) -> tuple[str, ...]:
    """Returns ("name",) if the data set's name determines the samples; with a path it is only a label."""
    return ("name",) if as_mapping(job.get("data")).get("path") is None else ()


def _files(job: Raw) -> Iterator[Finding]:
    """Yields faults of keys that need files or a data set's name, and of windows that are not of exactly one kind."""
    data = as_mapping(job.get("data"))
    if data.get("path") is None and data.get("name") is None:
        for key in ("version", "window", "held_out_path", "format", "time_column"):
            if data.get(key) is not None:
                yield Finding(("data", key), "goes with files", "give the name of a data set, or a path; or remove it")
    window = as_mapping(data.get("window"))
    given = [key for key in ("last_days", "last_rows") if window.get(key) is not None]
    given += ["since and until"] if window.get("since") is not None or window.get("until") is not None else []
    if isinstance(data.get("window"), Mapping) and len(given) != 1:
        given_text = " and ".join(given) if given else "nothing"
        yield Finding(
            ("data", "window"), f"says {given_text}", "give one of last_days, last_rows, and since with until"
        )
    for key in ("since", "until"):
        try:
            moment(window.get(key), 0.0)
        except ValueError as error:
            message, _, remedy = str(error).partition(": ")
            yield Finding(("data", "window", key), message, remedy or "write it as 2026-01-31")


def _arguments(job: Raw) -> Iterator[Finding]:
    for name in ("model", "data"):
        section = as_mapping(job.get(name))
        takers = ("factory", "dataset", "kind") if name == "data" else ("factory", "command")
        has_rows = section.get("path") is not None or section.get("name") is not None  # whose kind may be inferred
        if section.get("kwargs") and not has_rows and all(section.get(taker) is None for taker in takers):
            yield Finding(
                (name, "kwargs"),
                f"are arguments for no {' or '.join(takers)}",
                f"give a {takers[0]} too, or remove kwargs",
            )
    yield from _command(job, as_mapping(job.get("model")))
    yield from _attention(job, as_mapping(job.get("model")))


def _attention(job: Raw, model: Raw) -> Iterator[Finding]:
    chosen, place = model.get("attention", ModelSpec.attention), ("model", "attention")
    if chosen == ModelSpec.attention or chosen not in ATTENTIONS:
        return
    if model.get("factory") is not None or model.get("command") is not None:
        yield Finding(place, "is chosen for Hugging Face's models", "leave it out: what is built there chooses")
    elif "attn_implementation" in as_mapping(model.get("config")):
        yield Finding(place, "is said in config.attn_implementation too", "leave one of the two out")
    elif chosen == "flash" and job.get("precision", Job.precision) == "fp32":
        yield Finding(place, "flash computes in bf16 only", "set precision to bf16, or attention to sdpa")


def _command(job: Raw, model: Raw) -> Iterator[Finding]:
    has_command = model.get("command") is not None
    reads_its_own = as_mapping(job.get("data")).get("source") == "command"
    yield from findings_where(
        (
            model.get("config") and model.get("factory") is not None,
            ("model", "config"),
            "does not go with a factory",
            "hand the values to the factory as kwargs",
        ),
        (
            model.get("config") and has_command,
            ("model", "config"),
            "does not go with a command",
            "hand the values to the command as kwargs",
        ),
        (
            model.get("configs") and not has_command,
            ("model", "configs"),
            "are for a command",
            "give a command too, or remove configs",
        ),
        (
            model.get("adopt") and not has_command,
            ("model", "adopt"),
            "is for a command",
            "give the command that runs the script",
        ),
        (
            reads_its_own and not has_command,
            ("data", "source"),
            "is no data of ours",
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
    fewest = 0 if may_have_no_steps(job) else 1
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
            and not is_store(job)
            and not misspelt(job, JobEntry) & {"num_steps", "num_epochs"},
            ("num_steps",),
            "is missing",
            "give num_steps, such as 60, or num_epochs, such as 3",
        ),
        (
            steps is not None and epochs is not None,
            ("num_epochs",),
            "is given beside num_steps",
            "give one of the two",
        ),
    )


def _exact(job: Raw) -> Iterator[Finding]:
    chunk, size = job.get("exact_chunk"), job.get("global_batch_size", Job.global_batch_size)
    workers = as_mapping(job.get("local_updates")).get("workers")
    if chunk is not None and job.get("exact") is not True and workers is None:
        yield Finding(("exact_chunk",), "goes with exact: true", "set exact: true, or leave exact_chunk out")
    elif isinstance(chunk, int) and _are_counts(chunk, size):
        what = f"global_batch_size {size}"
        if _are_counts(workers):
            size //= workers
            what = f"a worker's {size} samples"
        if size % chunk or (size // chunk).bit_count() != 1:
            problem = f"divides {what} into a number of chunks that is no power of two"
            yield Finding(("exact_chunk",), problem, f"give {size} divided by 1, 2, 4, 8 or so")


def _untrusted(job: Raw) -> Iterator[Finding]:
    """Yields why segments of a job cannot be repeated and compared; places are relative to the job."""
    if job.get("allow_untrusted") is not True:
        return
    place, remedy = ("allow_untrusted",), "leave one of the two out"
    command = as_mapping(job.get("model")).get("command")
    yield from findings_where(
        (command is not None, place, "does not go with a command, whose states nobody else can repeat", remedy),
        (bool(job.get("may_vary")), place, "does not go with may_vary, which changes the steps on the way", remedy),
        (is_store(job), place, "is for training, and a store trains nothing", remedy),
    )


def _local_updates(job: Raw) -> Iterator[Finding]:
    local = as_mapping(job.get("local_updates"))
    workers, warmup = local.get("workers"), local.get("warmup_steps", LocalUpdates.warmup_steps)
    size, num_steps = job.get("global_batch_size", Job.global_batch_size), job.get("num_steps")
    yield from findings_where(
        (
            _are_counts(size, workers) and size % workers > 0,
            ("local_updates", "workers"),
            f"is {workers}, and global_batch_size {size} cannot be divided by it",
            "give a number that divides it",
        ),
        (
            bool(local.get("outer_momentum")) and not warmup,
            ("local_updates", "outer_momentum"),
            "goes with a warm-up: without one it wrecks the first rounds",
            "give warmup_steps, such as 128, or leave it out",
        ),
        (
            _are_counts(warmup, num_steps) and warmup >= num_steps,
            ("local_updates", "warmup_steps"),
            f"is {warmup}, and the job has {num_steps} steps",
            "give fewer, or leave local_updates out",
        ),
        (
            job.get("numerics") is not None and (bool(local) or job.get("exact") is True),
            ("numerics",),
            "does not go with the same bits everywhere",
            "leave one of the two out",
        ),
        (
            bool(local) and as_mapping(job.get("model")).get("command") is not None,
            ("local_updates",),
            "is for jobs that Ringmaster trains, not for commands",
            "leave it out",
        ),
    )


def _are_counts(*values: Any) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in values)


def _text(job: Raw) -> Iterator[Finding]:
    data = as_mapping(job.get("data"))
    if data.get("seq_len") is None and (
        data.get("source") == "python-stdlib"
        or (data.get("kind") in (None, "text", "language-modeling") and str(data.get("path")).endswith(".txt"))
    ):
        yield Finding(("data", "seq_len"), "is missing", "give the number of tokens of a sample of text, such as 128")


def _loss(job: Raw) -> Iterator[Finding]:
    """Yields the faults of a loss's options, and of what it does not go with; places are relative to the job."""
    loss = job.get("loss")
    name, options = loss_parts(loss)
    if loss is None and as_mapping(job.get("data")).get("kind") == "prompt":
        yield Finding(
            ("data", "kind"),
            "prompt has no answers to learn",
            "set loss: {name: grpo, rewards: [...]}, or give data with answers",
        )
    if not isinstance(name, str) or not is_named(name) or name not in loss_names():
        return  # the schema has reported it
    loss_type = loss_class(name)
    known = options_of(loss_type)
    for fault in option_faults(loss_type, options):
        if fault.option in known:
            or_not = "" if known[fault.option].required else ", or leave it out"
            yield Finding(("loss", fault.option), fault.problem, f"give {known[fault.option]}" + or_not)
        else:
            remedy = closest(fault.option, known, what="The options are") if known else "remove it: there are none"
            yield Finding(("loss", fault.option), f"is no option of {name}", remedy)
    weights, rewards = options.get("reward_weights"), options.get("rewards")
    lengths = (len(weights), len(rewards)) if isinstance(weights, list) and isinstance(rewards, list) else (0, 0)
    yield from findings_where(
        (
            "rewards" in known and as_mapping(job.get("data")).get("kind") != "prompt",
            ("data", "kind"),
            f"is not prompt, and the loss {name} reads prompts",
            "set kind: prompt",
        ),
        (
            lengths[0] != lengths[1],
            ("loss", "reward_weights"),
            "has {} numbers for {} rewards".format(*lengths),
            "give one for each",
        ),
        (
            loss_type.needs_reference and job.get("adaptation") is not None,
            ("loss",),
            f"{name} compares with the weights that the job begins with, which an adaptation changes",
            "leave the adaptation out, or give another loss",
        ),
    )


def not_finite(value: Any, *, place: Place) -> Iterator[Finding]:
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
    optimizer, steps = as_mapping(job.get("optimizer")), job.get("num_steps")
    schedule = as_mapping(job.get("schedule"))
    name, decay = schedule.get("name", ScheduleSpec.name), schedule.get("decay_ratio")
    warmup, warmup_ratio = schedule.get("warmup_steps"), schedule.get("warmup_ratio")
    total_ratio = _number(warmup_ratio) + _number(DECAY_RATIO if decay is None else decay)
    yield from findings_where(
        (
            isinstance(warmup, int) and isinstance(steps, int) and 0 < steps <= warmup,
            ("schedule", "warmup_steps"),
            f"must be less than the {steps} steps of the job, {got(warmup)}",
            "warm up for fewer steps",
        ),
        (
            warmup and warmup_ratio is not None,
            ("schedule", "warmup_ratio"),
            "is given beside warmup_steps",
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
    )
    optimizer_name = optimizer.get("name", OptimizerSpec.name)
    if isinstance(optimizer_name, str) and (known := OPTIMIZER_OPTIONS.get(optimizer_name)) is not None:
        options = as_mapping(optimizer.get("options"))
        for option, value in options.items():
            place = ("optimizer", "options", option)
            if option not in known:
                yield Finding(place, "is an unknown option", closest(option, known, what="The options are"))
            elif not known[option].fits(value):
                problem = f"must be {known[option].words}, got {value!r:.60}"
                yield Finding(place, problem, "change it, or leave it out for the default")
        if options.get("nesterov") is True and not (options.get("momentum", 0.95 * (optimizer_name == "muon"))):
            yield Finding(("optimizer", "options", "nesterov"), "needs momentum", "give momentum, such as 0.9")
    if job.get("freeze"):
        yield from findings_where(
            (
                job.get("adapter") is not None,
                ("freeze",),
                "stands beside an adapter, which freezes all weights already",
                "leave one of the two out",
            ),
            (
                as_mapping(job.get("model")).get("command") is not None,
                ("freeze",),
                "names parameters of a model that only its command knows",
                "leave it out: the command chooses what it trains",
            ),
            (is_rewriting(job), ("freeze",), "stands beside an adaptation that trains nothing", "leave it out"),
        )


def _number(value: Any) -> float:
    """Returns a number, or 0 in place of what is none, which the schema refuses."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0
