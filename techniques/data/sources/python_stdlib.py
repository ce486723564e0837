"""The source files of Python's standard library: real data that every machine has without a download."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ringmaster.techniques.data.prepared import Preparation, stamp
from ringmaster.techniques.data.splits import held_out_keys
from ringmaster.techniques.data.stored_source import StoredSource
from ringmaster.techniques.data.tokens import Document, write_tokens
from ringmaster.techniques.interface.job import DataSpec

# Tests, tables and whole applications. Without them a few MB of ordinary library code remain, prepared in seconds.
LEFT_OUT = frozenset(
    (
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "encodings",
        "turtledemo",
        "tkinter",
        "distutils",
        "ensurepip",
        "__pycache__",
    )
)


class PythonStdlib(StoredSource):
    """The running Python's modules, each a document; they are split by file."""

    name = "python-stdlib"

    def check(self, spec: DataSpec) -> None:
        """Requires the length of a sample, as there is no common length of documents."""
        if spec.seq_len is None:
            raise ValueError("data: seq_len is missing. To fix: say how many tokens a sample has, e.g. seq_len: 128")

    def preparation(self, spec: DataSpec, *, cache_dir: Path) -> Preparation:
        """Returns how the modules become tokens."""
        root = Path(sysconfig.get_path("stdlib"))
        files = list(_files(root))

        def documents() -> Iterator[Document]:
            held_out = held_out_keys(files, share=spec.held_out)
            for name in files:
                text = (root / name).read_bytes().decode("utf-8", errors="replace")
                yield Document(content=text, held_out=name in held_out)

        return Preparation(
            name=self.name,
            location=str(root),
            state=[(name, *stamp(root / name)) for name in files],
            write=lambda folder: write_tokens(folder, spec=spec, documents=documents, where=self.name),
        )


def _files(root: Path) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        # config-* and _sysconfigdata* describe how this Python was built; they are no library code.
        subfolders[:] = sorted(s for s in subfolders if s not in LEFT_OUT and not s.startswith(("config-", "lib-")))
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield (Path(folder) / name).relative_to(root).as_posix()
