"""The `DataSource` interface: what a kind of data reads, and how it becomes the samples of a job.

Samples are prepared once for each content, and then read in an order that the trainer chooses: the batch of a step is a
function of the job's seed and the step. A data source never shuffles, draws or divides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, Self

from ringmaster import features
from ringmaster.codec import SINCE_LATER
from ringmaster.registry import Registry, find
from ringmaster.techniques.job_features import Description
from ringmaster.techniques.job_specs import DataSpec

if TYPE_CHECKING:
    import torch


MAX_SHOWN = 10  # names in a line of text


def shown(names: Sequence[str]) -> str:
    """Returns the first names, for a line for users."""
    return ", ".join(names[:MAX_SHOWN]) + (", ..." if len(names) > MAX_SHOWN else "")


class Dataset(Protocol):
    """Map-style data set: each sample is a dict of tensors, with the same shapes in all samples.

    A sample has the arguments of the model's `forward` by their names, and "labels". A position whose label is
    `metric.IGNORED` does not count in losses and metrics.
    """

    def __len__(self) -> int:
        """Returns the number of samples."""

    def __getitem__(self, index: int, /) -> dict[str, torch.Tensor]:
        """Returns sample `index`, 0 <= index < len."""


@dataclass(frozen=True, kw_only=True)
class SampleTensor:
    """One tensor of each sample.

    dtype: torch's name for it, such as "int64".
    shape: of one sample.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """Data that is ready to be read, with the properties that a model depends on.

    name: a name for users, e.g. "python-stdlib".
    digest: identifies the samples' content: equal samples have the same digest on every machine. Of a factory's samples
        only a part is fingerprinted, see `sources.builtin`.
    num_samples, num_held_out: number of samples for training, and for evaluation.
    kind: "tokens", "images" or "other".
    vocab_size, seq_len: of token samples; seq_len in tokens.
    end_of_text_id: the token between documents.
    num_labels: number of labels of labelled samples.
    image_size, num_channels: of images; image_size in pixels, for square images only.
    source: the path, URI or dotted name that the data comes from.
    folder: the folder of the prepared arrays; "" for factories.
    tensors: the tensors of a sample, for data whose kind alone does not determine them: () means tokens or images,
        and labels. Samples are made up from them where the data is on another machine, or memory is estimated.
    labels: the names of the classes, in the order of their numbers; () where they have no names.
    pad_token_id: the token that fills up shorter samples.
    pads_left: whether it comes before a sample's tokens, and not behind them.
    num_truncated: number of samples that were longer than `seq_len` and were cut.
    num_left_out: number of samples that were left out, as no label was left in them.
    columns: (role, column) of what the samples are made of, such as ("label", "stars").
    notes: what users should know of the data in addition to its numbers, such as files that were left out.
    training_faults: why no model should be trained on the data, each with a remedy. It may still be evaluated on.
    lengths: of samples that differ in length, those which a half and nineteen of twenty training samples do not exceed.
    features: of tables of features, each feature with what was measured on the training samples, such as the names of
        its categories. A factory gets them as the argument `features`.
    empty_target: the tokens of a target without text, of data for encoder-decoders: the codes of languages, and ends.
    images: of texts with images: the token that stands for a part of an image (`token`), and of the sample with the
        most of them their number by image (`counts`), and the arrays of numbers that a model reads them by (`arrays`).
    parts: of the data of jobs that train a common component, each job and its data, as JSON: {"job", "data"}. A factory
        gets them as the argument `parts`.
    """

    name: str
    digest: str
    num_samples: int
    num_held_out: int
    kind: str
    vocab_size: int | None = None
    seq_len: int | None = None
    end_of_text_id: int | None = None
    num_labels: int | None = None
    image_size: int | None = None
    num_channels: int | None = None
    source: str
    folder: str = ""
    tensors: tuple[SampleTensor, ...] = field(default=(), metadata=SINCE_LATER)
    labels: tuple[str, ...] = field(default=(), metadata=SINCE_LATER)
    pad_token_id: int | None = field(default=None, metadata=SINCE_LATER)
    pads_left: bool = field(default=False, metadata=SINCE_LATER)
    num_truncated: int = field(default=0, metadata=SINCE_LATER)
    num_left_out: int = field(default=0, metadata=SINCE_LATER)
    columns: tuple[tuple[str, str], ...] = field(default=(), metadata=SINCE_LATER)
    notes: tuple[str, ...] = field(default=(), metadata=SINCE_LATER)
    training_faults: tuple[str, ...] = field(default=(), metadata=SINCE_LATER)
    lengths: tuple[int, ...] = field(default=(), metadata=SINCE_LATER)
    features: tuple[Mapping[str, Any], ...] = field(default=(), metadata=SINCE_LATER)
    parts: tuple[Mapping[str, Any], ...] = field(default=(), metadata=SINCE_LATER)
    empty_target: tuple[int, ...] = field(default=(), metadata=SINCE_LATER)
    images: Mapping[str, Any] = field(default_factory=dict, metadata=SINCE_LATER)

    def summary(self, kind: str) -> str:
        """Returns a line that describes how rows are read, how many there are, and what was cut off."""
        columns = ", ".join(name if name == role else f"{name} as {role}" for role, name in self.columns)
        parts = [f"{self.name} as {kind}{f' (columns {columns})' if columns else ''}"]
        held_out = f"{self.num_held_out:,} held out" if self.num_held_out else "none held out to compute metrics on"
        parts.append(f"{self.num_samples:,} samples to train on, {held_out}")
        if self.labels:
            parts.append(f"{len(self.labels)} classes ({shown(self.labels)})")
        if self.seq_len is not None:
            cut = f", and {self.num_truncated:,} were cut" if self.num_truncated else ""
            parts.append(f"up to {self.seq_len:,} tokens each{cut}")
        if self.num_left_out:
            parts.append(f"{self.num_left_out:,} were left out, as nothing to learn was left of them")
        return "; ".join((*parts, *self.notes))

    @property
    def tokenizer_dir(self) -> Path | None:
        """The folder with the tokenizer's files, or None where the data has no tokenizer of its own."""
        folder = Path(self.folder) / "tokenizer"
        return folder if self.folder and folder.is_dir() else None

    @property
    def processor_dir(self) -> Path | None:
        """The folder with the image processor's config, or None where the data is not images."""
        folder = Path(self.folder) / "processor"
        return folder if self.folder and folder.is_dir() else None


def shape_fields(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Returns the fields of a `PreparedData` that follow from the shapes of a sample's tensors."""
    tokens, image = shapes.get("input_ids"), shapes.get("pixel_values", ())
    return {
        "kind": "tokens" if tokens else "images" if image else "other",
        "seq_len": tokens[-1] if tokens else None,
        "image_size": image[-1] if len(image) == 3 and image[-1] == image[-2] else None,
        "num_channels": image[0] if len(image) == 3 else None,
    }


def sample_tensors(tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[SampleTensor, ...]:
    """Describes the tensors of a sample. tensors: the sample, or a batch. shapes: of one sample."""
    return tuple(
        SampleTensor(name=name, dtype=str(tensors[name].dtype).removeprefix("torch."), shape=shape)
        for name, shape in shapes.items()
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a file.

    number: its number in the file, from 1.
    value: the row as it was read: a mapping, or a text file, which is not read yet (`FileText`).
    content: what a job reads of it: a JSON value or a `FileText`.
    """

    file: str
    number: int
    value: Any
    content: Any
    held_out: bool


def column(*usual: str, is_optional: bool = False) -> Any:
    """Returns a field of `DataOptions`, called `ROLE_column`, with the name of the column that has a role.

    usual: the names of columns that usually have it; where the field is None, the first of those that are there is
        read. is_optional: whether rows may lack it.
    """
    return field(default=None, metadata={"usual": usual, "is_optional": is_optional})


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What a kind of data reads of a spec besides the fields that all kinds have.

    Each kind has a class of these. In batch files they are keys of `data`, or of its `kwargs` where `data` knows no
    such key. A kind with the field `labels` has classes, in the column `label_column`.

    ignored_columns: columns that are not read, though they may change what a row means; see `RowKind.decisive`.
    """

    ignored_columns: Annotated[
        tuple[str, ...], Description("columns that rows may have, and that are not to be read, such as [score]")
    ] = ()

    @classmethod
    def of(cls, spec: DataSpec, *, kind: str) -> Self:
        """Returns the options of a spec.

        Raises ValueError where it sets what the kind does not read, with all of that and the kinds that read it.
        """
        known = sorted((each.name for each in fields(cls)), key=lambda name: name == "ignored_columns")  # as the last
        # A data set with a name brings its column of text, and its splits, for all that read it.
        unread = [key for key in spec.options if key not in known and (spec.name is None or key != "text_column")]
        other_rows: tuple[str, ...] = ("time_column", "window") if spec.path is None else ()
        if spec.dataset is None and spec.name is None:
            other_rows += ("split", "held_out_split")
        if set_keys := [*unread, *(key for key in other_rows if getattr(spec, key) != getattr(DataSpec, key))]:
            of = " of files" if spec.path else " of a Hugging Face data set" if spec.dataset else ""
            raise ValueError(
                f"data: kind {kind}{of} does not read {', '.join(set_keys)}. To fix: remove what it does not read, or "
                f"set data.kind{_readers(unread)}; its options are: {', '.join(known) or 'none'}"
            )
        if spec.path is not None and (unknown := [name for name in spec.kwargs if name not in known]):
            raise ValueError(
                f"data: kind {kind} has no option {unknown[0]!r}. To fix: its options are: {', '.join(known) or 'none'}"
            )
        given = {name: value for name, value in {**spec.kwargs, **spec.options}.items() if name in known}
        for each in fields(cls):
            if type(each.default) in (int, str) and type(value := given.get(each.name, each.default)) is not type(
                each.default
            ):
                kind_of = "a whole number" if isinstance(each.default, int) else "a text"
                raise ValueError(f"data: {each.name} {value!r} is not {kind_of}. To fix: give {kind_of}")
        return cls(**given)


def _readers(options: Sequence[str]) -> str:
    """The built-in kinds that read each of some options."""
    kinds = {name: [each.name for each in fields(data_source_named(name).options_class)] for name in BUILTIN_SOURCES}
    readers = {each: ", ".join(name for name, known in kinds.items() if each in known) for each in options}
    listed = "; ".join(f"{each} is of {names}" for each, names in readers.items() if names)
    return f" ({listed})" if listed else ""


class DataSource(ABC):
    """A kind of data, a class without arguments in one file.

    Most kinds make a sample of each row of a file or a data set: `data.row_source.RowSource`
    implements everything except the options and the sample.

    Attributes:
        name: the name in batch files. An entry point has the same name.
        options_class: what the kind alone reads of a spec.
        reads: the fields of a `DataSpec` ("path", "dataset", "factory") of which one defines where the rows are; () for
            a source that needs none.
        pads: whether samples may differ in length, and are padded.
        packs: whether several samples may be in one row, for causal language models.
        has_own_columns: whether no other kind has its columns, so that they decide where a model's class is unknown.
        usual_loss: the loss by which models are evaluated on samples of several sequences, where no other one is known;
            None where a model's own loss reads the samples.
    """

    name: ClassVar[str]
    options_class: ClassVar[type[DataOptions]] = DataOptions
    reads: ClassVar[tuple[str, ...]] = ()
    pads: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    has_own_columns: ClassVar[bool] = False
    usual_loss: ClassVar[str | None] = None

    def options(self, spec: DataSpec) -> Any:
        """Returns the options of a spec, of `options_class`. Raises ValueError where it sets others."""
        return self.options_class.of(spec, kind=self.name)

    def check(self, spec: DataSpec) -> None:
        """Raises ValueError, with a remedy, where `spec` is wrong in itself, without reading any data."""
        self.options(spec)
        if spec.dataset is not None and spec.held_out_split == spec.split:
            raise ValueError(
                f"data: held_out_split {spec.split!r} is the split that is trained on. To fix: name another one, or "
                "leave it out: a share of the rows is then held out"
            )

    @abstractmethod
    def prepare(self, spec: DataSpec, *, cache_dir: Path) -> PreparedData:
        """Does the slow work once for each content, under `cache_dir`. Several processes may call it at the same time.

        Raises ValueError, with a remedy, where the data is unknown, empty, unreadable or too short.
        """

    @abstractmethod
    def open(self, spec: DataSpec, *, cache_dir: Path, prepared: PreparedData | None) -> tuple[Dataset, Dataset]:
        """Opens the training and the held-out samples.

        prepared: the result of an earlier `prepare`, whose samples are opened even if the files have changed since.

        Raises ValueError where they no longer exist and the files now have other content.
        """

    def rows(self, spec: DataSpec) -> Iterator[Row] | None:
        """Returns every row that a job reads of files, before any work on it; None where these are unknown."""
        return None

    def identity_of(self, spec: DataSpec) -> Callable[[Row], Any]:
        """Returns a function of a row of files whose result is the same for equal rows: its content, by default."""
        return lambda row: row.content


def check_same(prepared: PreparedData, wanted: PreparedData) -> None:
    """Raises ValueError where data has other samples than an earlier `prepare` found."""
    if prepared.digest != wanted.digest:
        raise ValueError(
            f"data {wanted.name!r} has changed: its samples were {wanted.digest} and are now {prepared.digest}. "
            f"To fix: start the job again, or bring back the data from {wanted.source}"
        )


BUILTIN_SOURCES: dict[str, str] = {
    "language-modeling": "ringmaster.techniques.data.tokens:TextFiles",
    "text-classification": "ringmaster.techniques.data.sources.text_rows:TextClassification",
    "text-regression": "ringmaster.techniques.data.sources.text_rows:TextRegression",
    "token-classification": "ringmaster.techniques.data.sources.text_rows:TokenClassification",
    "seq2seq": "ringmaster.techniques.data.sources.text_rows:Seq2Seq",
    "tokenized": "ringmaster.techniques.data.sources.token_rows:Tokenized",
    "chat": "ringmaster.techniques.data.sources.chat:Chat",
    "completion": "ringmaster.techniques.data.sources.completion:Completion",
    **features.dotted_names("DATA_SOURCES"),
    "image-classification": "ringmaster.techniques.data.sources.image_classification:ImageClassification",
    "hugging-face": "ringmaster.techniques.data.sources.builtin:HuggingFace",
    "python-stdlib": "ringmaster.techniques.data.sources.builtin:PythonStdlib",
    "digits": "ringmaster.techniques.data.sources.builtin:Digits",
    "command": "ringmaster.techniques.data.sources.builtin:CommandData",
    "factory": "ringmaster.techniques.data.sources.builtin:Factory",
}
DATA_SOURCES = Registry(kind="kind of data", entry_point_group="ringmaster.data_sources", builtin=BUILTIN_SOURCES)

SOURCES = ("python-stdlib", "digits", "command")
"""The values of `DataSpec.source`."""

DEFAULTS = {"path": "language-modeling", "dataset": "hugging-face", "factory": "factory"}
"""The data source of each field of a `DataSpec` where the spec names none."""


LANGUAGE_MODELING = "language-modeling"
ALIASES = {"text": LANGUAGE_MODELING}
"""Former names of kinds."""


def data_source_names() -> tuple[str, ...]:
    """Returns the names of all data sources, built-in ones first."""
    return tuple(DATA_SOURCES.paths())


def data_source_named(name: str) -> DataSource:
    """Returns a data source. Raises ValueError where no data source, or a faulty one, has the name."""
    source: DataSource = DATA_SOURCES.load(name, DataSource)()
    return source


def data_source_of(spec: DataSpec) -> DataSource:
    """Returns the data source that makes the samples of a spec.

    Raises ValueError where the spec names none or several, or does not define where the rows of one are.
    """
    given = [name for name in ("source", *DEFAULTS) if getattr(spec, name) is not None]
    named = "none" if not given else " and ".join(given)
    kind = ALIASES.get(spec.kind or "", spec.kind)
    if kind is not None and not (kind == LANGUAGE_MODELING and len(given) == 1 and given[0] in ("source", "dataset")):
        source = data_source_named(kind)
        if len(given) != min(len(source.reads), 1) or not set(given) <= set(source.reads):
            wanted = f"exactly one of {', '.join(source.reads)}" if source.reads else "none of them"
            raise ValueError(f"data: {named} given with kind {spec.kind}. To fix: give {wanted}")
        return source
    if len(given) != 1:
        raise ValueError(f"data: {named} given. To fix: give exactly one of source, path, dataset and factory")
    if spec.source is not None:
        find("source", spec.source, {name: BUILTIN_SOURCES[name] for name in SOURCES})
        return data_source_named(spec.source)
    return data_source_named(DEFAULTS[given[0]])


def installed_source(spec: DataSpec) -> str | None:
    """Returns the dotted path of the class of an installed data source that a spec names; None for built-in ones."""
    return None if spec.kind is None else DATA_SOURCES.installed_path(spec.kind)
