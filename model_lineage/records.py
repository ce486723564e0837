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
class ModelRecord:
    """A model in the ledger.

    model_id: of the MLflow LoggedModel ("m-..."), which names this model for ever.
    registered_name, version: in the model registry; version is None while none is registered.
    uri: "models:/NAME/VERSION", or "models:/MODEL_ID" while no version is registered.
    kind: one of ADAPTATION_KINDS. parents: model ids. run_id: of the run that made it.
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
