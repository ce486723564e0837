"""What a kind of data is that makes one sample of each row: the columns that are read, the sample, its padding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ringmaster.techniques.data.row_samples.class_labels import ClassLabels, FoundClasses, as_list
from ringmaster.techniques.data.row_samples.packing import POSITIONS
from ringmaster.techniques.data.row_samples.ragged import PaddedSamples
from ringmaster.techniques.data.row_samples.row_columns import Columns, columns_of_files
from ringmaster.techniques.data.row_samples.tokenizer import RowTokenizer
from ringmaster.techniques.data.sources.unread_keys import check_keys
from ringmaster.techniques.data.stored_source import StoredSource
from ringmaster.techniques.interface.data_source import PreparedData, Row
from ringmaster.techniques.interface.job import DataSpec
from ringmaster.techniques.interface.metric import IGNORED


@dataclass(frozen=True, kw_only=True)
class SampleContext:
    """What a sample is made with, besides its row.

    labels: the classes, for kinds of data that have some.
    """

    spec: DataSpec
    max_length: int
    _tokenizer: RowTokenizer | None = None
    _labels: ClassLabels | None = None

    @property
    def tokenizer(self) -> RowTokenizer:
        """The tokenizer of the data; only for kinds that set `needs_tokenizer`."""
        assert self._tokenizer is not None, "a kind of data that encodes text sets needs_tokenizer"
        return self._tokenizer

    @property
    def num_cut(self) -> int:
        """How often the tokenizer has cut a text so far."""
        return 0 if self._tokenizer is None else self._tokenizer.num_cut

    @property
    def found_classes(self) -> FoundClasses | None:
        """The classes of the data where they are found while samples are made."""
        return self._labels if isinstance(self._labels, FoundClasses) else None

    @property
    def labels(self) -> ClassLabels:
        """The classes of the data; only for kinds that name a `label_role`."""
        assert self._labels is not None, "a kind of data with classes names its label_role"
        return self._labels


class RowKind(StoredSource):
    """What a kind of data reads of a row, and the sample that it makes of it.

    Arrays of a sample named in `padding` may differ in length from row to row, in their last dimension. They are cut
    at the maximal length, and padded when a batch is made. All other arrays must have equal shapes. `collate` makes a
    batch of the padded arrays.

    version: to be incremented when the same rows become other samples than before, which are then prepared again.
    roles: what is read of a row, and for each the names of columns that usually hold it, the most usual first. A row
        is passed to `sample` by these names. Another column is selected by the spec's `ROLE_column`, or by that key of
        its `kwargs`.
    optional: the roles that rows may lack.
    label_role: the role that holds classes, which are found in the data unless the spec names its `labels`.
    options: the source's own keys among the spec's `kwargs`, with their defaults. All others go to `load_dataset`.
    needs_tokenizer: whether `sample` encodes text. It is encoded by the spec's tokenizer, or by one that is trained on
        what `texts` returns.
    encodes_texts: whether `sample` encodes what `texts` returns, so that the texts of many rows are encoded together.
        Otherwise it encodes something that contains the texts, so that their words are encoded together.
    padding: the values that fill arrays up, by the arrays' names. `input_ids` are filled with the padding token.
    uncut: arrays of `padding` that are no tokens, and so have any length.
    is_causal: whether samples are for causal language models. Such samples need no attention mask, as no token attends
        to the padding behind it.
    samples_class: opens the stored columns of a split.
    keeps_files: whether the samples of each file are kept, so that a new file costs no other file's samples again. Then
        a sample may depend on its row, the tokenizer and the spec's settings alone, and not on other files. Classes of
        `label_role` may be in `labels` alone.
    packs: whether several samples may lie in one row; only for causal ones of `input_ids` and `labels`.
    """

    reads = ("path", "dataset")
    pads = True
    version: ClassVar[int] = 1
    roles: ClassVar[Mapping[str, tuple[str, ...]]]
    optional: ClassVar[frozenset[str]] = frozenset()
    label_role: ClassVar[str | None] = None
    options: ClassVar[Mapping[str, Any]] = {}
    needs_tokenizer: ClassVar[bool] = False
    encodes_texts: ClassVar[bool] = True
    padding: ClassVar[Mapping[str, int]] = {
        "input_ids": 0,
        "attention_mask": 0,
        "token_type_ids": 0,
        "labels": IGNORED,
        POSITIONS: 0,  # each token of padding is then a sample of its own
    }
    is_causal: ClassVar[bool] = False
    samples_class: ClassVar[type[PaddedSamples]] = PaddedSamples
    uncut: ClassVar[frozenset[str]] = frozenset()
    keeps_files: ClassVar[bool] = True

    @abstractmethod
    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the arrays of one sample, or what `np.asarray` takes, by the names of `forward`'s arguments.

        row: the values by role; None for an optional role that the row lacks.

        Raises ValueError where a row is wrong; the message gets its place.
        """

    def texts(self, row: Mapping[str, Any], *, spec: DataSpec) -> Iterable[str]:
        """Returns the texts of a row: those that `sample` encodes, and on which a tokenizer is trained."""
        return ()

    def values(self, row: Row, columns: Columns, *, spec: DataSpec) -> dict[str, Any]:
        """Returns what `sample` gets of a row: its values by role."""
        return columns.by_role(row.content)

    def classes(self, value: Any) -> Iterable[Any]:
        """Returns the classes in the label of a row."""
        value = as_list(value)
        return value if isinstance(value, (list, tuple)) else (value,)

    def prepare_tokenizer(self, folder: Path, *, is_trained: bool) -> None:
        """Changes the tokenizer in `folder` before it is used. is_trained: whether it was trained on the data."""

    def described(self, prepared: PreparedData) -> PreparedData:
        """Returns the description of the samples, where a kind knows more of them."""
        return prepared

    def training_faults(self, folder: Path) -> Iterable[str]:
        """Returns why no model should be trained on the samples in a folder, beside labels that are all the same."""
        return ()

    def option(self, spec: DataSpec, name: str) -> Any:
        """Returns the value of one of `options`."""
        return spec.kwargs.get(name, self.options[name])

    def column(self, spec: DataSpec, role: str) -> str | None:
        """Returns the column that the spec names for a role, or None."""
        key = f"{role}_column"
        named: str | None = getattr(spec, key, None) or spec.kwargs.get(key)
        return None if role == "text" and named == DataSpec.text_column else named

    def check(self, spec: DataSpec) -> None:
        """Refuses keys that are not read, and unknown options of rows in files."""
        check_keys(spec, kind=self.name, columns=self.roles, has_classes=self.label_role is not None)
        if spec.path is None:
            return
        known = (*self.options, *(f"{role}_column" for role in self.roles))
        if unknown := [name for name in spec.kwargs if name not in known]:
            raise ValueError(
                f"data: kind {self.name} has no option {unknown[0]!r}. To fix: its options are: {', '.join(known)}"
            )

    def columns(self, spec: DataSpec, available: Sequence[str] | None = None) -> Columns:
        """Returns the column of each role. available: the columns that rows have; None for those of the first row.

        Raises ValueError, with the columns that there are, where a required role has none.
        """
        named = {role: self.column(spec, role) for role in self.roles}
        there = columns_of_files(spec, kind=self.name) if available is None else available
        where = spec.path or f"dataset {spec.dataset!r}"
        return Columns.find(self.roles, named=named, optional=self.optional, there=there, where=where)

    def texts_to_encode(self, row: Mapping[str, Any], *, spec: DataSpec) -> Iterator[str]:
        """Yields the texts of a row; none of a wrong row, which `sample` refuses with its place."""
        try:
            texts = list(self.texts(row, spec=spec))
        except ValueError:
            texts = []
        yield from (text for text in texts if isinstance(text, str))

    def with_columns(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yields rows. Raises ValueError where they have no columns."""
        for row in rows:
            if not isinstance(row.content, Mapping):
                raise ValueError(f"{row.file} has no columns. To fix: give JSONL, CSV or Parquet for kind {self.name}")
            yield row
