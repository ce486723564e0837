"""The values that go into a ledger and come out of it: plain, immutable, and free of MLflow."""

from dataclasses import dataclass

ADAPTATION_KINDS = (
    "pretrained",
    "fine-tuned",
    "lora",
    "prefix-tuned",
    "distilled",
    "pruned",
    "quantized",
    "merged",
    "imported",
)
COMPONENT = "component"
"""The kind of a node that is no model but a part that several models share: a tower, an embedding, a frozen stem."""


@dataclass(frozen=True)
class MetricPoint:
    """One measurement of a run. timestamp_ms: milliseconds since the epoch, or None for now."""

    key: str
    value: float
    step: int = 0
    timestamp_ms: int | None = None


@dataclass(frozen=True, kw_only=True)
class DatasetInput:
    """Data that a model was trained or evaluated on.

    digest: names the content; equal data have equal digests. source: where it was read, a path or a name.
    context: what it was used for, e.g. "training" or "evaluation". num_rows: samples, where they were counted.
    """

    name: str
    digest: str
    source: str
    context: str = "training"
    num_rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What made a model, beside its parents and its data, as far as that is known.

    job: its name in its batch. batch_run_id: the batch's run. plan: the path of the plan that was followed last among
    that run's artifacts. profiles: likewise of the job's profiles, in the model's own run. technique: what trained it
    last, such as "fsdp x2". checkpoints: the folder or URL that holds those of the job. num_steps: after which it was
    done. code_version: "git COMMIT" of the batch file's folder, else "ringmaster VERSION". seed: of the job.
    source: of an imported model, the folder or hub name. relation: to its base, as its card says it ("finetune", ...).
    """

    job: str | None = None
    batch_run_id: str | None = None
    plan: str | None = None
    profiles: str | None = None
    technique: str | None = None
    checkpoints: str | None = None
    num_steps: int | None = None
    code_version: str | None = None
    seed: int | None = None
    source: str | None = None
    relation: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """A model in the ledger.

    model_id: of the MLflow LoggedModel ("m-..."), which names this model for ever.
    registered_name, version: in the model registry; version is None while none is registered.
    uri: "models:/NAME/VERSION", or "models:/MODEL_ID" while no version is registered.
    kind: one of ADAPTATION_KINDS, or COMPONENT. parents: model ids. components: ids of the parts that it shares.
    run_id: of the run that made it. tensors_id: in the tensor store, where it is kept there.
    """

    model_id: str
    registered_name: str
    version: int | None
    uri: str
    kind: str = "imported"
    parents: tuple[str, ...] = ()
    datasets: tuple[DatasetInput, ...] = ()
    run_id: str | None = None
    experiment_id: str | None = None
    components: tuple[str, ...] = ()
    origin: Origin = Origin()
    tensors_id: str | None = None
