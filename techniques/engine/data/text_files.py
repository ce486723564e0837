"""Text, JSONL and Parquet files that a glob names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from techniques.engine.data.prepared import Source, stamp
from techniques.engine.data.splits import held_out_keys, is_held_out
from techniques.engine.data.tokens import Document, write_tokens
from techniques.job import DataSpec

Content = str | list[int]


def text_files(spec: DataSpec) -> Source:
    """The documents of all files that `spec.path` matches.

    A text file is one document; a row of a JSONL or Parquet file is one, its `text_column` being text or
    token ids (or its `input_ids`, where there is no such column). Several files are split by file; a single
    one by row, and a single text file at the line where its held-out share begins.
    """
    assert spec.path is not None
    root, files = _matching(spec.path)

    def documents() -> Iterator[Document]:
        if len(files) == 1:
            yield from _split_rows(root / files[0], spec)
            return
        held_out = held_out_keys(files, share=spec.held_out)
        for name in files:
            for content in _contents(root / name, spec.text_column):
                yield Document(content=content, held_out=name in held_out)

    return Source(
        name=spec.path,
        location=str(Path(spec.path).absolute()),
        state=[(name, *stamp(root / name)) for name in files],
        write=lambda folder: write_tokens(folder, spec=spec, documents=documents, where=f"path {spec.path!r}"),
    )


def _matching(pattern: str) -> tuple[Path, list[str]]:
    """The folder above all wildcards, and the files in it, by their names from there."""
    parts = Path(pattern).parts
    fixed = list(takewhile(lambda part: not any(sign in part for sign in "*?["), parts[:-1]))
    root, rest = Path(*fixed), str(Path(*parts[len(fixed) :]))
    found = sorted(file.relative_to(root).as_posix() for file in root.glob(rest) if file.is_file())
    if not found:
        is_folder = Path(pattern).is_dir()
        hint = f"name its files, e.g. {pattern}/*.jsonl" if is_folder else "check the glob, and where it starts"
        raise ValueError(f"path {pattern!r} matches no file (from {Path.cwd()}). To fix: {hint}")
    if unknown := sorted({Path(name).suffix or name for name in found} - set(READERS)):
        raise ValueError(
            f"path {pattern!r} matches files of unknown form: {', '.join(unknown)}. "
            f"To fix: name files that end in {', '.join(READERS)}"
        )
    return root, found


def _split_rows(file: Path, spec: DataSpec) -> Iterator[Document]:
    """The documents of a single file."""
    for content in _contents(file, spec.text_column):
        if file.suffix != ".txt":
            key = content if isinstance(content, str) else json.dumps(content)
            yield Document(content=content, held_out=is_held_out(key, share=spec.held_out))
            continue
        assert isinstance(content, str)
        cut = round(len(content) * (1 - spec.held_out))
        cut = content.rfind("\n", 0, cut) + 1 or cut if spec.held_out else len(content)
        yield Document(content=content[:cut], held_out=False)
        if content[cut:]:
            yield Document(content=content[cut:], held_out=True)


def _contents(file: Path, column: str) -> Iterator[Content]:
    try:
        yield from READERS[file.suffix](file, column)
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {error}. To fix: check the file") from error


def _read_text(file: Path, column: str) -> Iterator[Content]:
    yield file.read_text(encoding="utf-8")


def _read_jsonl(file: Path, column: str) -> Iterator[Content]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}, line {number} is no JSON: {error}. To fix: one object a line") from error
            yield _content(row, column, where=f"{file}, line {number}")


def _read_parquet(file: Path, column: str) -> Iterator[Content]:
    try:
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ValueError(f"{file} needs pyarrow. To fix: pip install pyarrow, or give JSONL") from error
    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file} is no Parquet file: {error}. To fix: check the file") from error
    columns = [name for name in (column, "input_ids") if name in table.schema_arrow.names][:1]
    for batch in table.iter_batches(columns=columns or None):
        for row in batch.to_pylist():
            yield _content(row, column, where=str(file))


def _content(row: Any, column: str, *, where: str) -> Content:
    """The text or the token ids of a row."""
    content = row.get(column, row.get("input_ids")) if isinstance(row, Mapping) else None
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(token, int) for token in content):
        return content
    there = sorted(row) if isinstance(row, Mapping) else type(row).__name__
    raise ValueError(
        f"{where} has no text (nor input_ids) in column {column!r}; it has {there}. To fix: set text_column"
    )


READERS: Mapping[str, Callable[[Path, str], Iterator[Content]]] = {
    ".txt": _read_text,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
