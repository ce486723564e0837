"""What a kind of data reads of a row, and the sample that it makes of it."""

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, ClassVar, Self

from ringmaster.features import listed
from ringmaster.registry import resolve
from ringmaster.techniques.data.arrow_files import POSITIONS
from ringmaster.techniques.data.chat_template import Remark
from ringmaster.techniques.data.class_labels import ClassLabels, as_list
from ringmaster.techniques.data.file_patterns import matching
from ringmaster.techniques.data.row_files import read_rows
from ringmaster.techniques.data.row_tokenizer import RowTokenizer
from ringmaster.techniques.data.stored_source import StoredSource
from ringmaster.techniques.data.text_encoder import VISIBLE
from ringmaster.techniques.data_source import DataOptions, PreparedData, Row, shown
from ringmaster.techniques.job_features import Description, Format, Whole
from ringmaster.techniques.job_specs import RETRIEVER, DataSpec
from ringmaster.techniques.metric import IGNORED

LABEL, IMAGE = "label", "image"
"""The role of the column that has the classes, and what the roles of columns of images begin with."""
MANIFEST, PREPARED = "store.json", "data.json"
"""The file of a store, and of prepared passages, that says what it was made of, with its digest."""
SEARCH = "ringmaster.features.stores.knowledge_store:find_passages"
"""What finds passages; it imports torch."""
PASSAGES_FILE = "passages.arrow"
"""The file of a store with the columns key, id and text."""
TEMPLATE = "{passages}\n\n{prompt}"
"""What a model reads where the job gives no template: the passages, and then its prompt, behind an empty line."""


@dataclass(frozen=True, kw_only=True)
class Retriever:
    """The passages of a knowledge store that are put before each prompt, or are hard negatives of each anchor.

    They are found when data is prepared, so that techniques and plans know nothing of stores, and the batch of a step
    remains a function of (seed, step). The digest of the store is part of what the prepared data is known by.

    Attributes:
        store: the folder of a knowledge store. In batch files also the name of a version, such as wiki@champion, or of
            a job. A folder with prepared passages represents a store that is not made yet: see `find_passages`.
        k: the passages of each question.
        template: what the model reads, with {passages}, of which each is a line, the best first, and {prompt}.
        passages: the JSON form of the data of the job that makes the store; None for a store that is there.
    """

    store: Annotated[
        str, Format("store"), Description("a job of kind store, a version such as wiki@champion, or a folder")
    ]
    k: Annotated[Whole, Description("the number of passages, such as 8")] = 5
    template: Annotated[str, Description('what the model reads, such as "{passages}\\n\\n{prompt}"')] = TEMPLATE
    passages: Annotated[
        Mapping[str, Any] | None, Description("left out: the data of the store's job, as a batch keeps it")
    ] = None

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Self:
        """Returns the retriever of a job's data. Raises ValueError, with a remedy, where it cannot be one."""
        if not isinstance(value.get("store"), str) or (others := sorted(value.keys() - cls.__dataclass_fields__)):
            wrong = "names no store" if "store" not in value else f"has no setting {others[0]}"
            raise ValueError(f"data.retriever {wrong}. To fix: write {{store: NAME@champion, k: 5}}")
        result = cls(**value)
        try:
            names = {name for _, name, _, _ in Formatter().parse(result.template) if name is not None}
        except ValueError:
            names = set()
        if names != {"passages", "prompt"}:
            raise ValueError(
                f"data.retriever: the template {result.template!r:.100} is not of passages and a prompt. To fix: write "
                "{passages} and {prompt} where they belong, and {{ for a brace"
            )
        return result

    @property
    def is_made(self) -> bool:
        """Whether the store is there; else its folder may have the passages that it will be made of."""
        return self.passages is None or (Path(self.store) / MANIFEST).is_file()

    @property
    def digest(self) -> str:
        """The digest of the store. Raises ValueError where the folder holds none."""
        try:
            file = Path(self.store) / (MANIFEST if self.is_made else PREPARED)
            return str(json.loads(file.read_text(encoding="utf-8"))["digest"])
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"data.retriever: {self.store} is not a folder of a knowledge store: {error}. To fix: name a store, or "
                "its folder (docs/retrieval.md)"
            ) from error

    def prompt(self, passages: Sequence[str], question: str) -> str:
        """Returns what the model reads."""
        return self.template.format(passages="\n".join(passages), prompt=question)


NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Values of a column by which a row has none."""
MEDIA = dict.fromkeys(
    ("image", "images", "video", "videos", "audio", "audios"),
    "and only texts are read. To fix: remove the rows that need it",
)
"""What is decisive where a model reads texts alone."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The column of each role. roles: all roles, also optional ones that no column has.

    unread: the other columns of the first row. decisive: columns that are not read, though they change what a row
        means, and what to do with such rows: "what is wrong. To fix: ...".
    late: the usual columns of each optional role that the first row lacks, which later rows may have.
    """

    columns: Mapping[str, str]
    roles: tuple[str, ...]
    optional: frozenset[str]
    unread: tuple[str, ...] = ()
    decisive: Mapping[str, str] = field(default_factory=dict)
    late: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def find(
        cls, options: DataOptions, *, there: Sequence[str], where: str, decisive: Mapping[str, str] | None = None
    ) -> Self:
        """Finds the column of each role: the one that the options name, else the first of the usual ones that is there.

        where: what messages call the data. decisive: see `RowKind.decisive`.

        Raises ValueError where a role that is not optional has no column, with all such roles.
        """
        result, missing, late = dict[str, str](), list[str](), dict[str, tuple[str, ...]]()
        keys = {each.name: each.metadata for each in fields(options) if "usual" in each.metadata}
        for key, about in keys.items():
            name = getattr(options, key)
            usual = about["usual"] if name is None else (name,)
            column = next((each for each in usual if each in there or _object_of(each) in there), None)
            if column is not None:
                result[key.removesuffix("_column")] = column
            elif name is not None or not about["is_optional"]:
                missing.append(key if name is None else f"{key} {name!r}")
            else:
                late[key.removesuffix("_column")] = about["usual"]
        if missing:
            raise ValueError(
                f"{where} has no column for {', '.join(missing)}; its rows have "
                f"{', '.join(sorted(there)) or 'no columns'}. "
                f"To fix: set {missing[0].split()[0]} to one of them, or to COLUMN.KEY for what a column of "
                "objects has, such as translation.en"
            )
        optional = frozenset(key.removesuffix("_column") for key, about in keys.items() if about["is_optional"])
        known = {*result.values(), *map(_object_of, result.values()), *options.ignored_columns}
        late = {role: tuple(name for name in names if name not in known) for role, names in late.items()}
        return cls(
            columns=result,
            roles=tuple(key.removesuffix("_column") for key in keys),
            optional=optional,
            unread=tuple(each for each in there if each not in known),
            decisive={name: what for name, what in (decisive or {}).items() if name not in known},
            late={role: names for role, names in late.items() if names},
        )

    def in_all_rows(self) -> Self:
        """Returns the same columns, of which an optional one is in all rows, or in none."""
        lacking = dict.fromkeys(
            chain.from_iterable(self.late.values()), "which the first row lacks. To fix: give all rows one, or none"
        )
        return replace(
            self, optional=self.optional - self.columns.keys(), decisive={**self.decisive, **lacking}, late={}
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(dict.fromkeys(self.columns.values()))

    @property
    def needed(self) -> tuple[str, ...]:
        """The names of the columns that are looked at: those that are read, and those that must have no value."""
        read = (*self.names, *map(_object_of, self.names))
        return tuple(dict.fromkeys((*read, *self.decisive, *chain.from_iterable(self.late.values()))))

    def content(self, row: Any, where: str) -> dict[str, Any]:
        """Returns what is read of a row, by column.

        Raises ValueError where the row lacks a column or its value, or has one in a column that must have none.
        """
        if not isinstance(row, Mapping):
            raise ValueError(f"{where} has no columns. To fix: give JSONL, CSV or Parquet")
        for name in self.decisive.keys() & row.keys():
            if row[name] not in NOTHING:
                what, _, remedy = self.decisive[name].partition(". To fix: ")
                raise ValueError(
                    f"{where} has a value in {name!r}, {what}. To fix: {remedy}; or set data.ignored_columns: [{name}]"
                )
        result = {name: _value_in(row, name) for name in self.names}
        for role, name in self.columns.items():
            if result[name] is None and role not in self.optional:
                problem = (
                    f"has no column {name!r}; it has {sorted(row)}" if name not in row else f"has no value in {name!r}"
                )
                raise ValueError(f"{where} {problem}. To fix: add the value, or remove the row")
        for names in self.late.values():  # a row without them has the same content as if nobody had looked for them
            result |= next(({name: row[name]} for name in names if row.get(name) not in NOTHING), {})
        return result

    def by_role(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of a row by role, with None for roles that it lacks."""
        result = {role: content.get(self.columns.get(role, "")) for role in self.roles}
        for role, names in self.late.items():
            result[role] = next((content[name] for name in names if name in content), None)
        return result


def _object_of(name: str) -> str:
    """The column of the object that holds the value COLUMN.KEY; the name itself where it has no dot."""
    return name.partition(".")[0]


def _value_in(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of COLUMN.KEY in an object; None where there is none."""
    if name in row:
        return row[name]
    column, _, key = name.partition(".")
    return _value_in(row[column], key) if key and isinstance(row.get(column), Mapping) else None


def retriever_of(spec: DataSpec) -> Retriever | None:
    """Returns what finds the passages that the samples of a spec read, if any. Raises ValueError on a wrong one."""
    value = spec.options.get(RETRIEVER) or spec.kwargs.get(RETRIEVER)
    return None if value is None else Retriever.of(value)


def columns_of_files(spec: DataSpec, *, kind: str) -> tuple[str, ...]:
    """Returns the columns of the first row of a spec's files.

    Raises ValueError where files cannot be read, are empty, or have no columns.
    """
    assert spec.path is not None
    result = matching(spec.path)
    for name in result.names:
        for _, row in read_rows(result.path(name), format=spec.format):
            if not isinstance(row, Mapping):
                raise ValueError(
                    f"{result.path(name)} has no columns. To fix: give JSONL, CSV or Parquet for kind {kind}"
                )
            return tuple(row)
    raise ValueError(f"path {spec.path!r} holds no row. To fix: check the files")


def text_of(row: Mapping[str, Any], role: str, *, may_be_blank: bool = False) -> str:
    """Returns the text of a role. Raises ValueError where it is another value, or has nothing that can be read.

    may_be_blank: whether it may consist of blanks, as an answer may.
    """
    value = row[role]
    if isinstance(value, Mapping):
        raise ValueError(
            f"the {role} is an object, not text. To fix: set {role}_column to COLUMN.KEY, with one of its keys "
            f"{shown([*map(str, value)])}"
        )
    if not isinstance(value, str):
        raise ValueError(f"the {role} is {type(value).__name__}, not text. To fix: name another {role}_column")
    if not value or not (may_be_blank or VISIBLE.search(value)):
        what = "empty" if not value else f"{value[:20]!a}, which has no visible character"
        raise ValueError(f"the {role} is {what}. To fix: add text, or remove the row")
    return value


@dataclass(frozen=True, kw_only=True)
class SampleContext:
    """What a sample is made with, besides its row.

    options: of the kind's `options_class`. labels: the classes, for kinds of data with `labels` among their options.
    opened: the stores that are read, by their folders, until all rows are.
    """

    spec: DataSpec
    options: Any
    max_length: int
    labels: ClassLabels = field(default_factory=ClassLabels)
    _tokenizer: RowTokenizer | None = None
    opened: dict[str, Any] = field(default_factory=dict)

    @property
    def tokenizer(self) -> RowTokenizer:
        """The tokenizer of the data; only for kinds that set `needs_tokenizer`."""
        assert self._tokenizer is not None, "a kind of data that encodes text sets needs_tokenizer"
        return self._tokenizer

    @property
    def retriever(self) -> Retriever | None:
        """What finds passages for each row, of kinds with a `retriever` among their options."""
        return retriever_of(self.spec)

    def find_passages(self, texts: Sequence[str], *, but: Sequence[str] | None = None) -> Sequence[Sequence[Any]]:
        """Returns the k passages of the retriever's store that are most similar to each text, the best first.

        but: for each text the one that is left out, with passages that hold it.

        Raises ValueError where the store has too few passages.
        """
        passages: Sequence[Sequence[Any]] = resolve(SEARCH)(self, texts, but=but)
        return passages

    @property
    def num_cut(self) -> int:
        """How often the tokenizer has cut a text so far."""
        return 0 if self._tokenizer is None else self._tokenizer.num_cut

    @property
    def num_written(self) -> int:
        """How many texts with special tokens that are plain text the tokenizer has encoded so far."""
        return 0 if self._tokenizer is None else self._tokenizer.num_written

    def take_remarks(self) -> int:
        """Returns what is to be said of the conversations that the tokenizer has encoded since the last call."""
        if self._tokenizer is None:
            return 0
        result, self._tokenizer.remarks = self._tokenizer.remarks, Remark(0)
        return int(result)


class RowKind(StoredSource):
    """What a kind of data reads of a row, and the sample that it makes of it.

    `options_class` says by its fields made by `column` which columns are read. A row is passed to `sample` by the roles
    of these.

    Arrays of a sample named in `padding` may differ in length from row to row, in their last dimension. They are cut
    at the maximal length, and padded when a batch is made. All other arrays must have equal shapes. `collate` makes a
    batch of the padded arrays.

    version: to be incremented when the same rows become other samples than before, which are then prepared again.
    needs_tokenizer: whether `sample` encodes text. It is encoded by the spec's tokenizer, or by one that is trained on
        what `texts` returns.
    reads_messages: whether rows may have lists of messages. A tokenizer that is trained on the data then gets a chat
        template.
    encodes_texts: whether `sample` encodes what `texts` returns, so that the texts of many rows are encoded together.
    file_role: what the roles begin with that have files, such as images, or paths of these; "" where none has.
    rounds_width: whether the width of a batch may be rounded up: not where a model reads its padding.
    cuts: whether samples are cut at the maximal length.
    padding: the values that fill arrays up, by the arrays' names. `input_ids` are filled with the padding token.
    uncut: arrays of `padding` that are not tokens, and so have any length. No model reads them.
    is_causal: whether samples are for causal language models. Such samples need no attention mask, as no token attends
        to the padding behind it.
    keeps_files: whether the samples of each file are kept, so that a new file costs no other file's samples again. Then
        a sample may depend on its row, the tokenizer and the spec's settings alone, and not on other files. Classes may
        be in `labels` alone.
    decisive: well-known columns that change what a row means and that are not read, each with what is wrong with a row
        that has a value there, and a remedy. Rows are refused, unless `ignored_columns` names the column.
        Features add some (`DECISIVE_COLUMNS` of their module `job`) to a kind and those derived from it.
    has_targets: whether labels are the tokens of a target, which an encoder-decoder writes.
    packs: whether several samples may be in one row; only for causal ones of `input_ids` and `labels`.
    rows_at_once: the number of rows whose samples are in memory together while they are prepared.
    """

    reads: ClassVar[tuple[str, ...]] = ("path", "dataset")
    pads = True
    version: ClassVar[int] = 1
    needs_tokenizer: ClassVar[bool] = False
    reads_messages: ClassVar[bool] = False
    encodes_texts: ClassVar[bool] = True
    file_role: ClassVar[str] = ""
    rounds_width: ClassVar[bool] = True
    cuts: ClassVar[bool] = True
    padding: ClassVar[Mapping[str, int]] = {
        "input_ids": 0,
        "attention_mask": 0,
        "token_type_ids": 0,
        "labels": IGNORED,
        POSITIONS: 0,  # each token of padding is then a sample of its own
    }
    is_causal: ClassVar[bool] = False
    has_targets: ClassVar[bool] = False
    decisive: ClassVar[Mapping[str, str]] = {}
    uncut: ClassVar[frozenset[str]] = frozenset()
    keeps_files: ClassVar[bool] = True
    rows_at_once: ClassVar[int] = 512

    @abstractmethod
    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the arrays of one sample, or what `np.asarray` takes, by the names of `forward`'s arguments.

        row: the values by role; None for an optional role that the row lacks.

        Raises ValueError where a row is wrong; the message gets its place.
        """

    def reference(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any] | None:
        """Returns what the library's own call gives for a row, such as `tokenizer(text)`; None where there is none.

        On some rows of the data, `sample` is compared with it: arrays of one name must be equal. What `sample` does
        otherwise for a reason, such as cutting at the maximal length, is done to the library's result here, too.

        row: as of `sample`, which has made a sample of it.
        """
        return None

    def remark(self, row: Mapping[str, Any], *, context: SampleContext) -> str | None:
        """Returns what users should know of a row of which a sample is made; None where it is like most rows.

        The rows of each remark are counted. row: as of `sample`.
        """
        return None

    def most_tokens(self, spec: DataSpec) -> tuple[int, str] | None:
        """Returns the most tokens of a sample that others read, and a note that says who; None without a limit."""
        return None

    def set_up_tokenizer(self, tokenizer: Any, *, options: Any) -> None:
        """Sets what the options say of a given tokenizer of transformers, before it is saved; by default nothing.

        options: of the kind's `options_class`. Raises ValueError where the tokenizer does not suit them.
        """

    def with_passages(self, rows: Sequence[Mapping[str, Any]], *, context: SampleContext) -> list[Mapping[str, Any]]:
        """Returns rows with what their retriever finds in a store; by default as they are.

        rows: as `sample` gets them. Rows that are wrong stay as they are, and `sample` refuses them.
        """
        return list(rows)

    def texts(self, row: Mapping[str, Any], *, context: SampleContext) -> Iterable[str]:
        """Returns the texts of a row: those that `sample` encodes, and on which a tokenizer is trained.

        context: without a tokenizer where one is trained. Raises ValueError where the row is wrong.
        """
        return ()

    def values(self, row: Row, columns: Columns, *, spec: DataSpec) -> dict[str, Any]:
        """Returns what `sample` gets of a row: its values by role; the path of a file is relative to its table."""
        result = columns.by_role(row.content)
        for role, value in result.items() if self.file_role and spec.path is not None else ():
            if role.startswith(self.file_role) and isinstance(value, str) and "://" not in value:
                result[role] = str(Path(row.file).parent / value)
        return result

    def file_paths(self, values: Mapping[str, Any]) -> Iterable[str]:
        """Returns the paths of the files that a row names, apart from URLs. values: as of `values`."""
        named = (value for role, value in values.items() if role.startswith(self.file_role))
        return [value for value in named if isinstance(value, str) and "://" not in value]

    def classes(self, value: Any) -> Iterable[Any]:
        """Returns the classes in the label of a row."""
        value = as_list(value)
        return value if isinstance(value, (list, tuple)) else (value,)

    def described(self, prepared: PreparedData) -> PreparedData:
        """Returns the description of the samples, where a kind knows more of them."""
        return prepared

    def training_faults(self, folder: Path) -> Iterable[str]:
        """Returns why no model should be trained on the samples in a folder, apart from labels that are all the
        same."""
        return ()

    @property
    def has_classes(self) -> bool:
        """Whether rows have classes, which are found in the data unless the options name the `labels`."""
        return any(each.name == "labels" for each in fields(self.options_class))

    def columns(self, spec: DataSpec, available: Sequence[str] | None = None) -> Columns:
        """Returns the column of each role. available: the columns that rows have; None for those of the first row.

        Raises ValueError, with the columns that there are, where a required role has none.
        """
        there = columns_of_files(spec, kind=self.name) if available is None else available
        where = spec.path or f"dataset {spec.dataset!r}"
        names = {getattr(each, "name", None) for each in type(self).__mro__}
        further = (
            pair for kind, columns in listed("job", "DECISIVE_COLUMNS") if kind in names for pair in columns.items()
        )
        return Columns.find(self.options(spec), there=there, where=where, decisive={**dict(further), **self.decisive})
