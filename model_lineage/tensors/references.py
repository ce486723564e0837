"""References to files of stored models: small files that stand for weights, in folders that hold no plain ones."""

from __future__ import annotations

import hmac
import json
import re
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ringmaster.errors import TensorStoreError
from ringmaster.files import write_atomically
from ringmaster.model_lineage.tensors.model_files import name_fault

WEIGHTS = ".safetensors"
REFERENCE = ".stored"  # ends the name of a small file that represents a file of weights
MAX_REFERENCE_BYTES = 1 << 16
MAX_FILE_BYTES = 1 << 63  # what MLflow's listings can express


@dataclass(frozen=True, kw_only=True)
class FileReference:
    """The file `path` of the stored model `model`, as a small file NAME.safetensors.stored in place of a plain one.

    seal: proves that a process which may read the store wrote it, see `TensorStore.check`. Those of releases until 0.2
    lack it.
    """

    model: str
    path: str
    num_bytes: int
    seal: str = ""

    @classmethod
    def at(cls, file: Path, *, named: str | None = None) -> FileReference | None:
        """Returns the reference that represents a file; None if there is none. Raises TensorStoreError on damage.

        named: the file's name in messages.
        """
        place = Path(f"{file}{REFERENCE}")
        try:
            status = place.lstat()
            if stat.S_ISDIR(status.st_mode):
                return None
            if not stat.S_ISREG(status.st_mode):
                raise TensorStoreError("it is not a plain file")
            if status.st_size > MAX_REFERENCE_BYTES:
                raise TensorStoreError(f"it has {status.st_size} bytes")
            return cls._parsed(json.loads(place.read_bytes()))
        except OSError:
            return None
        except (ValueError, RecursionError) as error:
            raise TensorStoreError(
                f"the reference {named or file}{REFERENCE} is damaged: {error}. To fix: log the model again"
            ) from error

    @classmethod
    def _parsed(cls, fields: Any) -> FileReference:
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
        model, path, num_bytes, seal = (fields.get(key) for key in ("model", "path", "num_bytes", "seal"))
        if not isinstance(model, str) or not re.fullmatch("[0-9a-f]{32}", model):
            raise ValueError("its model is not an id of a stored model")
        if not isinstance(path, str) or name_fault(path):
            raise ValueError("its path is not a name of a file")
        if type(num_bytes) is not int or not 0 <= num_bytes < MAX_FILE_BYTES:
            raise ValueError("its num_bytes is not a size")
        return cls(model=model, path=path, num_bytes=num_bytes, seal=seal if isinstance(seal, str) else "")

    @classmethod
    def below(cls, folder: Path, *, faults: list[str] | None = None) -> Iterator[tuple[Path, FileReference]]:
        """Yields (file, reference) of each reference in a folder.

        A damaged one is skipped, and its message is added to `faults`; without this list, it raises TensorStoreError.
        """
        for path in folder.rglob(f"*{WEIGHTS}{REFERENCE}"):
            file = Path(str(path).removesuffix(REFERENCE))
            try:
                reference = cls.at(file)
            except TensorStoreError as error:
                if faults is None:
                    raise
                faults.append(str(error))
                continue
            if reference is not None:
                yield file, reference

    def write(self, file: Path) -> None:
        """Lets the reference stand for a file; the plain file, if there is one, is removed."""
        self.overwrite(file)
        file.unlink(missing_ok=True)

    def overwrite(self, file: Path) -> None:
        """Lets the reference stand for a file in place of another reference."""
        write_atomically(Path(f"{file}{REFERENCE}"), json.dumps(asdict(self)).encode())

    def sealed(self, key: bytes) -> FileReference:
        """Returns the reference with the seal of the store that has the key."""
        return replace(self, seal=hmac.new(key, f"{self.model}/{self.path}".encode(), "sha256").hexdigest())

    def has_seal(self, key: bytes) -> bool:
        """Returns whether the reference has the seal of the store that has the key."""
        return hmac.compare_digest(self.seal.encode(errors="replace"), self.sealed(key).seal.encode())
