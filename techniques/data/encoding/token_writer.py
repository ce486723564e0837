"""Writes a stream of tokens as samples of one length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques.data.arrays import SPLITS, ColumnWriter, fingerprint
from ringmaster.techniques.interface.data_source import PreparedData
from ringmaster.techniques.interface.job import DataSpec

COLUMN = "input_ids"
# A column has 16 bits a token up to this many ids, and else 32.
MAX_SMALL_IDS = 1 << 16
TOKENS_PER_WRITE = 1 << 18


class TokenWriter:
    """Appends tokens to the stream of a split, in a column of `columns` that is cut into samples of `seq_len`.

    vocab_size: number of token ids; None where it is one more than the largest id that is appended.
    """

    def __init__(
        self, columns: ColumnWriter, *, seq_len: int, vocab_size: int | None = None, end_of_text_id: int | None = None
    ) -> None:
        self._columns, self._seq_len = columns, seq_len
        self._vocab_size, self._end_of_text_id = vocab_size, end_of_text_id
        self._largest = 0 if vocab_size is None else vocab_size - 1
        self._dtype = self._needed()
        self._num_tokens = dict.fromkeys(SPLITS, 0)
        self._waiting: dict[str, list[NDArray[Any]]] = {split: [] for split in SPLITS}
        self._num_waiting = 0

    def append(self, ids: NDArray[Any], *, held_out: bool) -> None:
        """Appends tokens to a split. ids: [tokens], at least 0. They are written by `flush` at the latest."""
        split = "held_out" if held_out else "training"
        self._num_tokens[split] += len(ids)
        self._waiting[split].append(ids)
        self._num_waiting += len(ids)
        if self._num_waiting >= TOKENS_PER_WRITE:
            self.flush()

    def flush(self) -> None:
        """Writes what was appended, before the columns are closed."""
        for split, waiting in self._waiting.items():
            if not waiting:
                continue
            ids = np.concatenate(waiting)
            waiting.clear()
            if self._vocab_size is None:
                self._largest = max(self._largest, int(ids.max(initial=0)))
                if self._needed() != self._dtype:
                    self._dtype = self._needed()
                    self._columns.convert(COLUMN, self._dtype)
            self._columns.append_stream(split, COLUMN, ids.astype(self._dtype, copy=False), row_len=self._seq_len)
        self._num_waiting = 0

    def described(self, folder: Path, *, spec: DataSpec, where: str) -> PreparedData:
        """Returns the description of the columns, which are closed by now. Raises ValueError where a split is short."""
        self._check_sizes(spec, where=where)
        num_samples, num_held_out = (self._columns.num_rows(split) for split in self._num_tokens)
        return PreparedData(
            name="",
            source="",
            digest=fingerprint(folder),
            kind="tokens",
            vocab_size=self._largest + 1,
            seq_len=self._seq_len,
            num_samples=num_samples,
            num_held_out=num_held_out,
            end_of_text_id=self._end_of_text_id,
        )

    def _needed(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self._largest < MAX_SMALL_IDS else np.uint32)

    def _check_sizes(self, spec: DataSpec, *, where: str) -> None:
        wanted = ["training"] + ["held_out"] * (spec.held_out > 0 or spec.held_out_split is not None)
        for split in wanted:
            if self._num_tokens[split] < self._seq_len:
                more = "" if split == "training" else f", raise held_out {spec.held_out} (or set it to 0)"
                raise ValueError(
                    f"{where}: the {split} part has {self._num_tokens[split]} tokens, fewer than one sample of seq_len "
                    f"{self._seq_len}. To fix: lower seq_len{more}, or give more text"
                )
