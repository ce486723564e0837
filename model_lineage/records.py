"""Immutable records that a ledger stores and returns, without any dependency on MLflow."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

IMPORTED, INDEXED = "imported", "indexed"
ADAPTATION_KINDS = (
    "pretrained",
    "fine-tuned",
    "lora",
    "prefix-tuned",
    "prompt-tuned",
    "ia3",
    "distilled",
    "pruned",
    "quantized",
    "quantization-aware",
    "merged",
    "composed",
    "extracted",
    INDEXED,
    IMPORTED,
)
INITIALIZED = "initialized"
"""The relation of a model to a parent of which it has its first weights, and that its kind does not concern."""
CHAMPION, PREVIOUS, CHALLENGER = "champion", "previous", "challenger"
"""The aliases of a registered model: of the version that serves, of the one before it, and of the one compared last."""
PROMOTED, KEPT, ROLLED_BACK, WAITING = "promoted", "kept", "rolled back", "waiting"
"""The outcomes of decisions about a version. `KEPT`: its champion stays."""
REJECTED, UNDONE, FAILED = "rejected", "undone", "failed"
"""States of a model other than its aliases and `ROLLED_BACK`. `FAILED`: it was never completed."""
COMPONENT = "component"
"""The kind of a node for a part that several models share, such as a tower, an embedding or a frozen stem."""


@dataclass(frozen=True)
class MetricPoint:
    """One measurement of a run. timestamp_ms: milliseconds since the epoch; None means the current time."""

    key: str
    value: float
    step: int = 0
    timestamp_ms: int | None = None


@dataclass(frozen=True, kw_only=True)
class DatasetInput:
    """Data that a model was trained or evaluated on.

    digest: identifies the content; equal data have equal digests.
    source: the path or name that the data were read from.
    context: the purpose, e.g. "training" or "evaluation".
    num_rows: the number of samples, or None where they were not counted.
    version, split, window: the part of a named data set that was read.
    rows_digest: identifies the rows alone, however they were cut into samples.
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
        """The name, followed by the version if there is one, as in "reviews/3"."""
        return self.name if self.version is None else f"{self.name}/{self.version}"

    @property
    def short_label(self) -> str:
        """The label, of files without the folders, and the start of the digest, for a line or a box."""
        *folders, file = self.label.split("/") if self.label.startswith("/") else [self.label]
        name = f"{folders[-1]}/{file}" if folders and "*" in file else file
        return f"{name} {self.digest[:8]}"

    def facts(self) -> dict[str, str | int]:
        """Returns the fields that are set, without name, digest, source and context."""
        known = {key: getattr(self, key) for key in ("num_rows", "version", "split", "window", "rows_digest")}
        return {key: value for key, value in known.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Origin:
    """How a model was made, apart from its parents and its data, as far as that is known.

    job: the job's name in its batch.
    batch_run_id: the MLflow run of the batch.
    plan: the path of the last plan that was executed, among the artifacts of the batch's run.
    profiles: the path of the job's profiles, among the artifacts of the model's own run.
    chain: the path of the chain of its states there.
    technique: the technique that trained the model last, such as "fsdp x2".
    checkpoints: the folder or URL of the job's checkpoints.
    num_steps: the number of training steps.
    code_version: "git COMMIT" of the batch file's folder, or "ringmaster VERSION".
    seed: the seed of the job.
    quantized_base: the format of the base, such as "nf4", where an adapter was trained on a base in 4 bits.
    source: the folder or hub name that an imported model came from.
    started_from: the parent that the first weights are from, where the model's kind implies another one: the base of a
        student that another model teaches. In a record, it is a model id.
    relation: the relation of an imported model to its base, as its card states it ("finetune", ...).
    retraining: the name of the file of models whose retraining run made the model.
    """

    job: str | None = None
    batch_run_id: str | None = None
    plan: str | None = None
    profiles: str | None = None
    chain: str | None = None
    technique: str | None = None
    checkpoints: str | None = None
    num_steps: int | None = None
    code_version: str | None = None
    seed: int | None = None
    quantized_base: str | None = None
    source: str | None = None
    relation: str | None = None
    started_from: str | None = None
    retraining: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """A model in the ledger.

    model_id: the permanent id of the MLflow LoggedModel ("m-...").
    registered_name, version: the name and version in the model registry; version is None while none is registered.
    uri: "models:/NAME/VERSION", or "models:/MODEL_ID" while no version is registered.
    kind: one of ADAPTATION_KINDS, or COMPONENT.
    parents: the model ids of the parents; first the one that the weights are from.
    components: the ids of the components that the model shares with others.
    run_id: the run that made the model.
    tensors_id: the model's id in the tensor store, or None if it is not stored there.
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

    @property
    def weights_from(self) -> str | None:
        """The id of the model that the first weights are from: of an adapter, the model that it is on."""
        return self.origin.started_from or next(iter(self.parents), None)

    def relation_to(self, parent_id: str) -> str:
        """Returns how the model was made from one of its parents: its kind, or INITIALIZED."""
        return INITIALIZED if parent_id == self.origin.started_from else self.kind


def states_of(
    *, aliases: Collection[str], outcome: str | None, is_undone: bool = False, is_ready: bool = True
) -> tuple[str, ...]:
    """Returns the states of a model, for its page and in pictures; none of one that nothing was decided about.

    outcome: of the last decision about it. is_undone: whether others were made without what is undone in its place.
    """
    of_decision = {KEPT: REJECTED, ROLLED_BACK: ROLLED_BACK, WAITING: WAITING}.get(outcome or "")
    of_alias = next((alias for alias in (CHALLENGER, PREVIOUS) if alias in aliases), None)
    shown = CHAMPION if CHAMPION in aliases else of_decision or of_alias
    flags = {FAILED: not is_ready, UNDONE: is_undone}
    return (*([shown] if shown else []), *(flag for flag, is_set in flags.items() if is_set))


def metric_text(metrics: Mapping[str, float], *, main: str | None, num_rows: object = None) -> str:
    """Returns the main metric of a model, such as "accuracy 0.71 of 256 rows"; of older records the first one."""
    name = main if main in metrics else next((each for each in metrics if "/" not in each), None)
    if name is None:
        return ""
    return f"{name} {metrics[name]:.4g}" + (f" of {num_rows} rows" if num_rows else "")
