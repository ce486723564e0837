"""Pydantic models of the batch file: the keys and the type of each value.

The models mirror the frozen dataclasses of `ringmaster.techniques.job` and take their defaults from them; those of
optional features are built from the features' dataclasses (`part_sections`). A field's description completes the
sentence "To fix: give ..."; editors show it too.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Self, Union, get_args, get_origin

from pydantic import Field, WithJsonSchema, create_model, model_validator
from pydantic.functional_validators import AfterValidator

from ringmaster.findings import Place
from ringmaster.tasks.batch import references
from ringmaster.tasks.batch.part_sections import SECTIONS, Section, keys_of
from ringmaster.tasks.batch.references import (
    MAX_EPOCHS,
    Adopt,
    Command,
    DataKind,
    Devices,
    Distinct,
    EvaluationMetric,
    Factory,
    FileFormat,
    Folder,
    FreezePattern,
    Kwargs,
    Loss,
    ModuleName,
    Name,
    Objective,
    OneOf,
    Parent,
    Pattern,
    Positive,
    Technique,
    Whole,
)
from ringmaster.tasks.planning.objectives import objective_names
from ringmaster.techniques import job
from ringmaster.techniques.data import SOURCES
from ringmaster.techniques.data.row_files import FORMATS
from ringmaster.techniques.data.row_kind import Retriever
from ringmaster.techniques.job_parts import MAX_AT_ONCE, MAX_WHOLE, file_keys, part_kinds
from ringmaster.techniques.loss import loss_names
from ringmaster.techniques.processes.order import KEPT_CHECKPOINTS


class Window(Section):
    """The rows of a data set to read: one of last_days, last_rows, and since, until or both."""

    last_days: Positive | None = Field(default=None, description="days back from the newest row, such as 30")
    last_rows: Whole | None = Field(default=None, description="a number of rows, the last ones, such as 10000")
    since: str | float | None = Field(default=None, description="the first moment, such as 2026-01-31")
    until: str | float | None = Field(default=None, description="the moment before which rows lie, such as 2026-03-01")


class RetrieverSection(Section):
    """The passages of a knowledge store that are put before each prompt, or are hard negatives of each anchor."""

    store: Annotated[str, AfterValidator(references.store)] = Field(
        description="a job of kind store, a version such as wiki@champion, or a folder"
    )
    k: Whole = Field(default=Retriever.k, description="the number of passages, such as 8")
    passages: Kwargs | None = Field(
        default=None, description="left out: the data of the store's job, as a batch keeps it"
    )
    template: str = Field(
        default=Retriever.template, description='what the model reads, such as "{passages}\\n\\n{prompt}"'
    )


class Data(Section):
    """The source of the samples: exactly one of source, path, dataset, factory, and the name of a data set.

    A kind of data that brings its own rows needs none of them.
    """

    source: Annotated[str, OneOf(tuple(SOURCES))] | None = Field(
        default=None, description="a data set that every machine has: python-stdlib (text) or digits (images)"
    )
    # Before the paths, whose validation reads it.
    format: FileFormat | None = Field(default=None, description=f"one of {', '.join(FORMATS)}")
    path: Annotated[str, AfterValidator(references.files)] | None = Field(
        default=None,
        description='text, JSONL, CSV or Parquet files, relative to the batch file, such as "data/*.jsonl"',
    )
    dataset: Folder | None = Field(default=None, description="a Hugging Face datasets name or folder, such as wikitext")
    factory: Factory | None = Field(
        default=None,
        description='"package.module:function", which returns (training, held_out), such as my_data:load',
    )
    kind: DataKind | None = Field(
        default=None, description="what makes samples of the rows, such as text, or leave the key out"
    )
    kwargs: Kwargs = Field(
        default={}, description="the arguments of the factory, of load_dataset, or of the kind, such as {name: en}"
    )
    seq_len: Annotated[int, Field(ge=2, le=MAX_AT_ONCE)] | None = Field(
        default=None, description="the number of tokens of a text sample, such as 128"
    )
    vocab_size: Annotated[int, Field(ge=257, le=MAX_AT_ONCE)] = Field(
        default=job.DataSpec.vocab_size, description="the size of the byte-level vocabulary, such as 2048"
    )
    tokenizer: Folder | None = Field(default=None, description="a folder or hub name with a tokenizer, such as gpt2")
    text_column: str = Field(default="text", description="the column that holds the text, such as text")
    split: str = Field(default=job.DataSpec.split, description="the split of the data set to train on, such as train")
    held_out_split: str | None = Field(default=None, description="the split to evaluate on, such as test")
    held_out: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=job.DataSpec.held_out, description="the share held out for evaluation, such as 0.1"
    )
    name: str | None = Field(default=None, description="the name of a data set under `datasets:`, such as reviews")
    version: int | str | None = Field(default=None, description="a version of the data set, such as 3, or latest")
    held_out_path: Annotated[str, AfterValidator(references.files)] | None = Field(
        default=None, description='files to evaluate on, such as "data/test/*.jsonl"'
    )
    window: Window | None = Field(default=None, description="the rows to read, such as {last_days: 30}")
    time_column: str | None = Field(default=None, description="the column with a row's time, such as at")
    labels: Annotated[list[str], Distinct] = Field(
        default=[], description="the classes, in the order of their numbers, such as [negative, positive]"
    )
    ignored_columns: list[str] = Field(
        default=[], description="columns that rows may have, and that are not to be read, such as [score]"
    )
    padding: Annotated[str, OneOf(job.PADDINGS)] = Field(
        default=job.DataSpec.padding, description=f"one of {', '.join(job.PADDINGS)}"
    )
    sampling: Annotated[str, OneOf(job.SAMPLINGS)] = Field(
        default=job.DataSpec.sampling, description=f"one of {', '.join(job.SAMPLINGS)}"
    )
    packing: bool = Field(
        default=job.DataSpec.packing,
        description="whether several samples share a row of seq_len tokens, which global_batch_size then counts",
    )
    text_pair_column: str | None = Field(
        default=None, description="the column that holds the second text of a pair, such as question2"
    )
    label_column: str | None = Field(
        default=None, description="the column that holds the class, or the number to predict, such as stars"
    )
    tokens_column: str | None = Field(default=None, description="the column that holds a list of words, such as words")
    input_column: str | None = Field(
        default=None, description="the column that holds the text that an encoder-decoder reads, such as article"
    )
    target_column: str | None = Field(
        default=None, description="the column that holds the text that an encoder-decoder writes, such as summary"
    )
    source_language: str | None = Field(
        default=None, description="the code of the language that a translation model reads, such as eng_Latn"
    )
    target_language: str | None = Field(
        default=None, description="the code of the language that a translation model writes, such as fra_Latn"
    )
    messages_column: str | None = Field(
        default=None, description="the column that holds a list of messages, such as conversation"
    )
    tools_column: str | None = Field(
        default=None, description="the column that holds the tools of a conversation, such as functions"
    )
    prompt_column: str | None = Field(
        default=None, description="the column that holds the text before the answer, such as question"
    )
    completion_column: str | None = Field(
        default=None, description="the column that holds the answer to learn, such as answer"
    )
    chosen_column: str | None = Field(
        default=None, description="the column that holds the answer that people prefer, such as better"
    )
    rejected_column: str | None = Field(
        default=None, description="the column that holds the other answer, such as worse"
    )
    anchor_column: str | None = Field(
        default=None, description="the column that holds the text to embed, such as query"
    )
    positive_column: str | None = Field(
        default=None, description="the column that holds the text that belongs to it, such as passage"
    )
    negative_column: str | None = Field(
        default=None, description="the column that holds a similar text that does not belong to it, such as other"
    )
    id_column: str | None = Field(default=None, description="the column that holds the id of a passage, such as url")
    image_column: str | None = Field(
        default=None, description="the column that holds the path of an image, such as file"
    )
    retriever: RetrieverSection | None = Field(
        default=None, description="the passages that samples read, such as {store: wiki@champion, k: 8}"
    )


class DatasetVersion(Section):
    """The files of a version: either path or splits."""

    path: str | None = Field(default=None, description='files or an fsspec URL, such as "data/v1/*.jsonl"')
    splits: dict[str, str] = Field(
        default={}, description="paths by split, such as {train: data/train.jsonl, test: data/test.jsonl}"
    )
    digest: str | None = Field(
        default=None, description="the fingerprint that its content must have; `ringmaster datasets show` prints it"
    )


class DatasetSection(DatasetVersion):
    """A data set with a name. If it has one version only, the [keys of that](#dataset-version) may be given here."""

    versions: dict[str, DatasetVersion] = Field(
        default={}, description="the versions, the newest last, such as {1: {path: ...}, 2: {path: ...}}"
    )
    format: FileFormat | None = Field(default=None, description=f"one of {', '.join(FORMATS)}")
    columns: dict[str, Annotated[str, OneOf(references.COLUMN_TYPES)]] = Field(
        default={},
        description="the type of each column that all rows have, such as {text: text, stars: integer?}",
    )
    text_column: str | None = Field(default=None, description="the column that holds the text, such as text")
    time_column: str | None = Field(default=None, description="the column with a row's time, such as at")
    held_out_split: str | None = Field(default=None, description="the split to evaluate on, such as test")


PLANNER_KEYS = ("deadline_s", "weight", "user")
"""The keys of a job's entry that only the planner reads."""
STORE = "store"
"""The `kind` of a job that makes a knowledge store."""
PROFILING_SHARE = 0.05
"""The default of `profiling_share`."""
MAX_DEVICES = 2**16
"""The most devices of a gang."""


class ModelSection(Section):
    """The source of a model: architecture, from_pretrained or both, a factory, or a command."""

    architecture: Annotated[str, AfterValidator(references.architecture)] | None = Field(
        default=None,
        description="a Hugging Face class, such as LlamaForCausalLM; with from_pretrained, the class that gets the "
        "weights, with a fresh head where they have none",
    )
    config: Kwargs = Field(
        default={},
        description="the fields of its Hugging Face config, such as {hidden_size: 256}; without a width, those of "
        "`base`",
    )
    from_pretrained: Annotated[str, AfterValidator(references.pretrained)] | None = Field(
        default=None,
        description="a folder with config.json and safetensors weights, or the name of a model on the hub",
    )
    factory: Factory | None = Field(
        default=None,
        description='"package.module:function", which returns a torch module, such as my_models:build',
    )
    kwargs: Kwargs = Field(default={}, description="the arguments of the factory, such as {width: 64}")
    attention: Annotated[str, OneOf(job.ATTENTIONS)] = Field(
        default=job.ModelSpec.attention, description=f"one of {', '.join(job.ATTENTIONS)}"
    )
    command: Command | None = Field(
        default=None, description='a trainer of your own that speaks our protocol, such as "python train.py"'
    )
    configs: Annotated[list[Kwargs], Distinct] = Field(
        default=[], description="configs for the command, such as [{micro_batch: 8}]"
    )
    adopt: Adopt = Field(default=None, description="true for an unedited script of Trainer, TRL or Accelerate")


SECTIONS[job.ModelSpec] = ModelSection


class ParameterGroupSection(Section):
    """Settings of the parameters whose names match a pattern; a later group overrides an earlier one."""

    match: Pattern = Field(description='a glob pattern of parameter names, such as "*.bias" or "classifier.*"')
    lr: Positive | None = Field(default=None, description="the learning rate of these parameters, such as 1e-3")
    weight_decay: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="the weight decay of these parameters, such as 0.0"
    )


class Optimizer(Section):
    """The optimizer that updates the weights: [formulas](optimizers.md#optimizers)."""

    name: Annotated[str, OneOf(job.OPTIMIZERS)] = Field(
        default=job.OptimizerSpec.name, description=f"one of {', '.join(job.OPTIMIZERS)}"
    )
    lr: Positive = Field(default=job.OptimizerSpec.lr, description="a learning rate such as 3e-4")
    options: Kwargs = Field(default={}, description="further arguments of the optimizer, such as {weight_decay: 0.1}")
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="the factor of the learning rate from each layer to the one below it, such as 0.9"
    )
    groups: list[ParameterGroupSection] = Field(
        default=[], description='a list of settings by parameter name, such as [{match: "*.bias", weight_decay: 0.0}]'
    )
    decay_norms_and_biases: bool = Field(
        default=job.OptimizerSpec.decay_norms_and_biases,
        description="false for no weight decay of parameters with fewer than two dimensions, else true",
    )


class Schedule(Section):
    """The learning rate over the steps: [formulas](optimizers.md#schedules)."""

    name: Annotated[str, OneOf(job.SCHEDULES)] = Field(
        default=job.ScheduleSpec.name, description=f"one of {', '.join(job.SCHEDULES)}"
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default=job.ScheduleSpec.warmup_steps, description="the steps of the linear warm-up, such as 10"
    )
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        default=None, description="the warm-up's share of the steps in place of warmup_steps, such as 0.1"
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=job.ScheduleSpec.min_lr_ratio,
        description="the share of the learning rate at which the decay ends, such as 0.1",
    )
    num_steps: Whole | None = Field(
        default=None, description="the steps of the schedule where the job is a part of them, or leave it out"
    )
    decay_ratio: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description=f"the share of the steps in which wsd decays, such as {job.DECAY_RATIO}"
    )


class Evaluation(Section):
    """The evaluation on held-out data by [metrics](evaluation.md#metrics)."""

    every_steps: Whole | None = Field(default=None, description="the steps between two evaluations, such as 30")
    at_steps: Annotated[list[Whole], Distinct] = Field(
        default=[], description="further steps after which to evaluate, such as [10, 100]"
    )
    metrics: Annotated[list[EvaluationMetric], Field(min_length=1), Distinct] = Field(
        default=list(job.EvaluationSpec.metrics),
        description="a list of metrics, such as [loss, accuracy]",
    )
    max_rows: Whole = Field(
        default=job.EvaluationSpec.max_rows, description="the most held-out rows of one evaluation, such as 1024"
    )
    max_batches: Whole | None = Field(
        default=None,
        description="max_rows in batches of the file's own global_batch_size, whatever a sweep tries, such as 16",
    )
    max_new_tokens: Whole = Field(
        default=job.EvaluationSpec.max_new_tokens,
        description="the most tokens that a model writes for a metric generated_*, such as 64",
    )


class AdapterSection(Section):
    """The adapter that is trained in place of the model's own weights."""

    kind: Annotated[str, OneOf(job.ADAPTERS)] = Field(
        default=job.Adapter.kind, description=f"one of {', '.join(job.ADAPTERS)}"
    )
    rank: Whole = Field(default=job.Adapter.rank, description="the rank of a lora, such as 8")
    alpha: Positive = Field(
        default=job.Adapter.alpha, description="the scale of a lora before the division by its rank, such as 16"
    )
    rank_stabilised: bool = Field(
        default=job.Adapter.rank_stabilised, description="true to scale by the root of the rank, else false"
    )
    targets: Annotated[list[ModuleName], Distinct] = Field(
        default=[], description="a list of names of linear modules, such as [q_proj, v_proj], or leave the key out"
    )
    feedforward: Annotated[list[ModuleName], Distinct] = Field(
        default=[], description="those of the targets whose inputs an ia3 scales, such as [down_proj]"
    )
    num_virtual_tokens: Whole = Field(
        default=job.Adapter.num_virtual_tokens, description="the length of a prefix or a prompt, such as 20"
    )
    modules_to_save: Annotated[list[ModuleName], Distinct] = Field(
        default=[], description="a list of names of modules that are trained as they are, such as [classifier]"
    )
    from_pretrained: Annotated[str, AfterValidator(references.adapter)] | None = Field(
        default=None, description="a folder with an adapter that peft or a job has saved"
    )
    dora: bool = Field(default=job.Adapter.dora, description="true for a DoRA, else false")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=job.Adapter.dropout, description="the share of a lora's inputs to drop in training, such as 0.05"
    )
    initialization: Annotated[str, OneOf(job.INITIALIZATIONS)] = Field(
        default=job.Adapter.initialization, description=f"of a lora, one of {', '.join(job.INITIALIZATIONS)}"
    )
    base_adapter: Annotated[str, OneOf(job.BASE_ADAPTERS)] | None = Field(
        default=None, description="continue, to train the adapter of the base further, or merge, to build on it"
    )

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        """Checks that the settings agree with those of the folder that the adapter continues from."""
        references.agreeing(job.Adapter(**{key: _frozen(value) for key, value in self.model_dump().items()}))
        return self


class JobEntry(Section):
    """One model to train."""

    name: Name = Field(description="a name of up to 100 letters, digits, '-', '_' and '.', such as llama-small")
    model: ModelSection = Field(description="the model, such as {architecture: LlamaForCausalLM, config: {...}}")
    base: Parent | None = Field(default=None, description="another job's name, models:/NAME@ALIAS or a folder")
    adapter: AdapterSection | None = Field(
        default=None,
        description="an adapter, such as {kind: lora, rank: 8}, or leave the key out: every weight is trained",
    )
    freeze: Annotated[list[FreezePattern], Distinct] = Field(
        default=[],
        description='glob patterns of parameters that are not trained, such as ["*", "!classifier.*"]: "!" takes out '
        "again, and the last match decides",
    )
    data: Data = Field(description="the data, such as {source: python-stdlib, seq_len: 128}")
    loss: Loss | None = Field(
        default=None,
        description=f"one of {', '.join(loss_names())}, also with options, such as {{name: dpo, beta: 0.1}}; or "
        '"package.module:function", which returns (sum, count), such as my_losses:focal',
    )
    precision: Annotated[str, OneOf(job.PRECISIONS)] = Field(
        default=job.Job.precision, description=f"one of {', '.join(job.PRECISIONS)}"
    )
    communication: Annotated[str, OneOf(job.COMMUNICATIONS)] = Field(
        default=job.Job.communication, description=f"one of {', '.join(job.COMMUNICATIONS)}"
    )
    compile: bool = Field(default=job.Job.compile, description="true to compile the model's layers, else false")
    optimizer: Optimizer = Field(
        default_factory=Optimizer, description="the optimizer, such as {name: adamw, lr: 3e-4}"
    )
    schedule: Schedule = Field(
        default_factory=Schedule, description="the schedule, such as {name: cosine, warmup_steps: 10}"
    )
    clip_grad_norm: Positive | None = Field(default=None, description="the largest norm of the gradient, such as 1.0")
    global_batch_size: Annotated[int, Field(ge=1, le=MAX_AT_ONCE)] = Field(
        default=job.Job.global_batch_size,
        description="the samples of one step on whatever devices, such as 16",
    )
    # The minimum depends on the adaptation: see `rules`.
    num_steps: Annotated[int, Field(le=MAX_WHOLE), WithJsonSchema({"type": "integer", "minimum": 0})] | None = Field(
        default=None, description="the number of optimizer steps, such as 60"
    )
    num_epochs: Annotated[float, Field(gt=0, le=MAX_EPOCHS)] | None = Field(
        default=None, description="the passes over the training data, such as 3"
    )
    evaluation: Evaluation = Field(default_factory=Evaluation, description="the evaluation, such as {every_steps: 30}")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(default=job.Job.seed, description="a seed such as 0")
    techniques: Annotated[list[Technique], Field(min_length=1), Distinct] | None = Field(
        default=None,
        description="a list of techniques to choose from, such as [single, fsdp], or leave the key out",
    )
    num_devices: Annotated[list[Annotated[int, Field(ge=1, le=MAX_DEVICES)]], Field(min_length=1), Distinct] | None = (
        Field(default=None, description="a list of gang sizes to choose from, such as [1, 2], or leave the key out")
    )
    exact: bool = Field(
        default=job.Job.exact, description="true for the same bits on any number of devices, else false"
    )
    exact_chunk: Whole | None = Field(
        default=None, description="the samples of one forward and backward of an exact job, such as 4"
    )
    deadline_s: Positive | None = Field(
        default=None, description="the seconds from the batch's start by which the job must have ended, such as 3600"
    )
    weight: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="how much the moment of the job's end counts under `objective: weighted`, such as 2"
    )
    user: Name | None = Field(
        default=None,
        description="whose job it is, for `objective: fairness` and `users`, such as ana; default: its own",
    )


if not TYPE_CHECKING:
    keys = keys_of((*dict.fromkeys(part_kinds().values()), *file_keys("ENTRY_KEYS")))
    JobEntry = create_model("JobEntry", __base__=JobEntry, __doc__=JobEntry.__doc__, **keys)


class GridEntry(Section):
    """A template of a job and the values to try: every combination becomes a job."""

    template: dict[str, Any] = Field(description="a job, whose name the names of all combinations start with")
    over: Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], Field(min_length=1)] = Field(
        description="lists of values by key, such as {optimizer.lr: [1e-4, 3e-4]}"
    )


class UserSection(Section):
    """What the jobs of a user may hold at a time; both limits hold where both are given."""

    max_devices: Whole | None = Field(default=None, description="the most devices, such as 4")
    share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="the most devices as a share of all, such as 0.5; a job alone may always run"
    )


class BatchEntry(Section):
    """A whole batch file."""

    name: Name = Field(
        default="batch", description="a name of up to 100 letters, digits, '-', '_' and '.', such as tonight"
    )
    objective: Objective = Field(
        default="makespan", description="makespan, weighted, mean_completion, fairness, cost or time-to-target"
    )
    price_per_device_hour: Positive = Field(
        default=1.0, description="what a device costs an hour, for `objective: cost`, such as 2.5"
    )
    profiling_share: Annotated[float, Field(ge=0)] = Field(
        default=PROFILING_SHARE,
        description="the largest share of the predicted time that trials may take, such as 0.05; 0: no trials",
    )
    keep_checkpoints: Annotated[int, Field(ge=1)] = Field(
        default=KEPT_CHECKPOINTS,
        description="how many checkpoints a job keeps, such as 20, for audits from more steps",
    )
    devices: Devices = Field(default="auto", description="auto, {cpu: 2}, {gpu: 2} or {gpu: all}")
    users: dict[Name, UserSection] = Field(
        default={}, description="quotas of users, such as {ana: {max_devices: 4, share: 0.5}}"
    )
    datasets: dict[str, DatasetSection] | str | None = Field(
        default=None, description="data sets by name, or a file with them, such as datasets.yaml"
    )
    jobs: list[JobEntry] = Field(default=[], description="a list of jobs")
    grid: list[GridEntry] = Field(default=[], description="a list of {template: ..., over: ...}")


if not TYPE_CHECKING:
    keys = keys_of(file_keys("BATCH_KEYS"))
    BatchEntry = create_model("BatchEntry", __base__=BatchEntry, __doc__=BatchEntry.__doc__, **keys)


def json_schema() -> dict[str, Any]:
    """Returns the JSON schema of batch files, with which editors complete and check them."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | BatchEntry.model_json_schema()
    schema["properties"]["objective"] |= {"enum": list(objective_names())}
    parts = schema["$defs"]
    # A key that the template lacks may be given under `over`.
    parts["GridEntry"]["properties"]["template"] = parts["JobEntry"] | {"required": ["name"]}
    return schema


def section_at(place: Place, *, root: type[Section] = BatchEntry) -> type[Section] | None:
    """Returns the model of the mapping at `place` of a file of type `root`, or None if any key is allowed there."""
    section: Any = root
    for part in place:
        if isinstance(part, int):
            continue
        if get_origin(section) is dict:  # any key is allowed there
            section = _inner(get_args(section)[1])
            continue
        if not (isinstance(section, type) and issubclass(section, Section)) or part not in section.model_fields:
            return None
        section = _inner(section.model_fields[part].annotation)
    return section if isinstance(section, type) and issubclass(section, Section) else None


def misspelt(raw: Mapping[str, Any], section: type[Section]) -> set[str]:
    """Returns the keys of `section` that resemble unknown keys of `raw`: these are misspelt rather than missing."""
    keys = list(section.model_fields)
    return {key for name in set(raw) - set(keys) for key in get_close_matches(name, keys, n=1)}


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _inner(annotation: Any) -> Any:
    """Returns the item type of an optional or a list annotation."""
    if get_origin(annotation) in (Union, UnionType):
        return _inner(next(a for a in get_args(annotation) if a is not type(None)))
    return _inner(get_args(annotation)[0]) if get_origin(annotation) is list else annotation
