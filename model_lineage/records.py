"""The values that go into a ledger and come out of it: plain, immutable, and free of MLflow."""

from dataclasses import dataclass

IMPORTED = "imported"
ADAPTATION_KINDS = (
    "pretrained",
    "fine-tuned",
    "lora",
    "prefix-tuned",
    "ia3",
    "distilled",
    "pruned",
    "quantized",
    "merged",
    IMPORTED,
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
    version, split, window: of a data set with a name, the part of it that was read. rows_digest: names the rows alone,
    however they were cut into samples.
    """

    name: str
    digest: str
    source: str
    context: str = "training"
    num_rows: int | None = None
    version: str | None = None
    split: str | None = None
    window: str | None = None
    rows_digest: str | None = None

    @property
    def label(self) -> str:
        """The name, and the version where it has one, as in "reviews/3"."""
        return self.name if self.version is None else f"{self.name}/{self.version}"

    def facts(self) -> dict[str, str | int]:
        """What is known of it beside its name, digest, source and use."""
        known = {key: getattr(self, key) for key in ("num_rows", "version", "split", "window", "rows_digest")}
        return {key: value for key, value in known.items() if value is not None}


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
