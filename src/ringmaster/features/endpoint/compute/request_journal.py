"""A file to which a training endpoint appends what it has done, from which a killed one is brought back bit by bit.

The state of a client is a function of the state that was last stored whole and of the requests that were answered
since then; so a few kilobytes of tokens take the place of the adapter and its moments after every step. Each record is
its length and checksum, followed by a safetensors file of the requests' tensors whose metadata hold the rest. A record
that a kill has cut off is left out.
"""

import json
import os
import re
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from io import FileIO
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from ringmaster.features.endpoint.compute.requests import AdamStep, LossRequest, TokenRow
from ringmaster.techniques.checkpoints.storage import sync_path

HEAD = struct.Struct("<QI")
"""The bytes of a record, and their CRC-32."""
NAMED = re.compile(r"journal-(\d+)\.bin")


@dataclass(frozen=True, kw_only=True)
class JournalRecord:
    """What was computed at once: losses with gradients, or optimizer steps. number: counts the records."""

    number: int
    losses: tuple[LossRequest, ...] = ()
    steps: tuple[AdamStep, ...] = ()


class RequestJournal:
    """The journal in a folder. number: of the next record."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.number = 0
        self._file: FileIO | None = None

    def records(self) -> Iterator[JournalRecord]:
        """Yields all records that are whole, in order."""
        for first, path in self._files():
            self.number = max(self.number, first)
            for content in _contents(path.read_bytes()):
                record = _decoded(content)
                self.number = record.number + 1
                yield record

    def append(self, *, losses: Sequence[LossRequest] = (), steps: Sequence[AdamStep] = ()) -> None:
        """Appends a record, which survives a kill of the process from then on."""
        content = _encoded(JournalRecord(number=self.number, losses=tuple(losses), steps=tuple(steps)))
        file, left = self._opened(), memoryview(HEAD.pack(len(content), zlib.crc32(content)) + content)
        start = file.tell()
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:  # behind a part of a record, nothing could be read
            file.truncate(start)
            file.seek(start)
            raise
        self.number += 1

    def sync(self) -> None:
        """Waits until all records are on the disk, and so survive a loss of power."""
        if self._file is not None:
            os.fdatasync(self._file.fileno())

    def clear(self) -> None:
        """Removes all records, as every client's state has been stored whole."""
        old = [path for _, path in self._files()]
        self.close()
        self._opened()
        for path in old:
            if path != self._path():
                path.unlink()
        sync_path(self._folder)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _path(self) -> Path:
        return self._folder / f"journal-{self.number}.bin"

    def _files(self) -> list[tuple[int, Path]]:
        named = ((NAMED.fullmatch(path.name), path) for path in self._folder.iterdir())
        return sorted((int(match[1]), path) for match, path in named if match)

    def _opened(self) -> FileIO:
        if self._file is None:  # always a new file: behind a record that a kill cut off, nothing could be read
            self._file = open(self._path(), "wb", buffering=0, opener=partial(os.open, mode=0o600))  # noqa: SIM115
            sync_path(self._folder)
        return self._file


def _contents(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + HEAD.size <= len(data):
        length, checksum = HEAD.unpack_from(data, at)
        content = data[at + HEAD.size : at + HEAD.size + length]
        if len(content) != length or zlib.crc32(content) != checksum:
            return
        yield content
        at += HEAD.size + length


def _encoded(record: JournalRecord) -> bytes:
    tensors: dict[str, Tensor] = {}
    losses = []
    for i, request in enumerate(record.losses):
        losses.append(
            {
                "client": request.client,
                "loss": request.loss,
                "loss_config": dict(request.loss_config),
                "num_rows": len(request.rows),
            }
        )
        for j, row in enumerate(request.rows):
            tensors[f"{i}/{j}"] = torch.tensor(row.tokens, dtype=torch.int64)
            tensors |= {f"{i}/{j}/{name}": value.contiguous() for name, value in row.loss_inputs.items()}
    content = {"number": record.number, "losses": losses, "steps": [asdict(step) for step in record.steps]}
    result: bytes = save(_without_shared_memory(tensors), metadata={"record": json.dumps(content)})
    return result


def _without_shared_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors that lie in one memory, which safetensors refuses."""
    known: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if place in known else tensor
        known.add(place)
    return result


def _decoded(content: bytes) -> JournalRecord:
    (length,) = struct.unpack_from("<Q", content)
    stored = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["record"])
    tensors, inputs = load(content), defaultdict[str, dict[str, Tensor]](dict)
    for name, value in tensors.items():
        request, row, *rest = name.split("/", maxsplit=2)
        if rest:
            inputs[f"{request}/{row}"][rest[0]] = value
    losses = []
    for i, each in enumerate(stored["losses"]):
        names = [f"{i}/{j}" for j in range(each.pop("num_rows"))]
        rows = [TokenRow(tokens=tuple(tensors[name].tolist()), loss_inputs=inputs[name]) for name in names]
        losses.append(LossRequest(rows=tuple(rows), **each))
    return JournalRecord(
        number=stored["number"], losses=tuple(losses), steps=tuple(AdamStep(**step) for step in stored["steps"])
    )
