"""A bundle of parts, each of which is collected alone: one that fails is noted, and the others are there."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringmaster.flows.diagnosis.redaction import Redactor
from ringmaster.text import printable_lines

CONTENTS = "contents.json"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A file of the bundle.

    name: its path within the bundle.
    """

    name: str
    text: str

    @classmethod
    def of_json(cls, name: str, value: Any) -> Part:
        """Returns a part with a JSON value; what JSON has no form for is written as text."""
        return cls(name=name, text=json.dumps(value, indent=1, default=str, ensure_ascii=False) + "\n")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A part that could not be collected. error: the kind and the text of the error."""

    part: str
    error: str


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What was collected, without secrets."""

    parts: tuple[Part, ...]
    failures: tuple[Failure, ...]

    def write(self, file: Path) -> None:
        """Writes a tar.gz that only its owner can read. Its files lie in a folder with the name of the file."""
        folder = file.name.partition(".")[0] or "ringmaster"
        contents = {
            "parts": {part.name: len(part.text.encode()) for part in self.parts},
            "failures": {failure.part: failure.error for failure in self.failures},
        }
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as opened, tarfile.open(fileobj=opened, mode="w:gz") as archive:
            os.fchmod(descriptor, 0o600)  # also where the file was there before
            for part in (Part.of_json(CONTENTS, contents), *self.parts):
                content = part.text.encode()
                entry = tarfile.TarInfo(f"{folder}/{part.name}")
                entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(content))


Collect = Callable[[], Iterable[Part]]


def collect(sources: Mapping[str, Collect], *, redact: Redactor) -> Bundle:
    """Collects the parts of all sources, and removes the secrets from their texts, names and errors.

    sources: by name, a function that returns parts. It may raise anything: the error is noted under that name.
    """
    parts, failures = list[Part](), list[Failure]()
    for name, source in sources.items():
        try:
            for part in source():
                parts.append(Part(name=redact(part.name), text=printable_lines(redact(part.text), limit=sys.maxsize)))
        except Exception as error:  # noqa: BLE001 - noted in the bundle: what fails is what the report is about
            failures.append(Failure(part=name, error=redact(f"{type(error).__name__}: {error}")))
    return Bundle(parts=tuple(parts), failures=tuple(failures))
