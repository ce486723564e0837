"""Refuses settings of data that a kind of data does not read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from ringmaster.techniques.interface.job import DataSpec

DEFAULTS = DataSpec()
COLUMN_KEYS = tuple(field.name for field in fields(DataSpec) if field.name.endswith("_column"))
TIME_KEYS, SPLIT_KEYS = ("time_column", "window"), ("split", "held_out_split")


def check_keys(spec: DataSpec, *, kind: str, columns: Collection[str], has_classes: bool) -> None:
    """Raises ValueError where a spec sets keys that its kind of data does not read, all of them, or one split twice.

    columns: the roles of the columns that are read. has_classes: whether `labels` are.
    """
    if spec.dataset is not None and spec.held_out_split == spec.split:
        raise ValueError(
            f"data: held_out_split {spec.split!r} is the split that is trained on. To fix: name another one, or leave "
            "it out: a share of the rows is then held out"
        )
    read = {f"{role}_column" for role in columns} | ({"labels"} if has_classes else set())
    unread = [key for key in (*COLUMN_KEYS, "labels") if key not in {*read, *TIME_KEYS}]
    unread += [] if spec.path is not None else TIME_KEYS  # of rows in files
    unread += [] if spec.dataset is not None else SPLIT_KEYS
    if spec.name is not None:  # the data set with the name says them, for all that read it
        unread = [key for key in unread if key not in ("text_column", *SPLIT_KEYS)]
    if given := [key for key in unread if getattr(spec, key) != getattr(DEFAULTS, key)]:
        of = "files" if spec.dataset is None else "a data set of Hugging Face"
        raise ValueError(
            f"data: kind {kind} of {of} does not read {', '.join(given)}. To fix: remove what it does not read, or set "
            f"data.kind; its columns are: {', '.join(sorted(read - {'labels'}))}"
        )
