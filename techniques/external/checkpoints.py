"""Checkpoints whose content only a command understands, stored as safely as Ringmaster's own.

They are folders such as `step-00000030` with the same manifest: it has no tensors, but the size and SHA-256 of every
file. So `CheckpointStore.newest` finds the newest whole one. The command writes into its own folder. When it reports
the checkpoint, the folder is synced, described in a manifest, and renamed to its final place.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from hashlib import file_digest
from pathlib import Path
from typing import Any

from ringmaster.codec import digest, to_json
from ringmaster.errors import CheckpointError
from ringmaster.techniques.checkpoints.checkpoint import Manifest, StoredFile
from ringmaster.techniques.checkpoints.storage import MANIFEST

INCOMING = "incoming"


def incoming(root: Path) -> Path:
    """Creates an empty folder on the same file system for the command to write into."""
    folder = root / INCOMING
    shutil.rmtree(folder, ignore_errors=True)  # left by a command that died
    folder.mkdir(parents=True)
    return folder


def adopt(root: Path, folder: Path, *, step: int, meta: Mapping[str, Any], keep: int = 2) -> Path:
    """Makes the files that a command wrote into `folder` the checkpoint of `step` under `root`, and removes old ones.

    Raises ValueError where the folder is not below the one from `incoming`, CheckpointError where the disk fails.
    """
    if not folder.is_dir() or not folder.resolve().is_relative_to((root / INCOMING).resolve()):
        raise ValueError(
            f"the command named {folder} as its checkpoint of step {step}. To fix: write it into a folder below save_to"
        )
    final = root / f"step-{step:08d}"
    aside = final.with_suffix(".tmp")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        _describe(aside, step=step, meta=meta)
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        _point_latest(root, final.name)
        _sync(root)
        # Newer checkpoints are damaged, or the command would have used them. They must not displace whole ones.
        up_to_here = [old for old in sorted(root.glob("step-????????")) if old.name <= final.name]
        for old in up_to_here[:-keep]:
            shutil.rmtree(old)
    except OSError as error:
        raise CheckpointError(f"checkpoint {final.name} could not be stored under {root}: {error}") from error
    return final


def _describe(folder: Path, *, step: int, meta: Mapping[str, Any]) -> None:
    files = {}
    for path in sorted(folder.rglob("*")):
        _sync(path)
        if path.is_file() and path.name != MANIFEST:
            with path.open("rb") as stream:
                checksum = file_digest(stream, "sha256").hexdigest()
            files[str(path.relative_to(folder))] = StoredFile(num_bytes=path.stat().st_size, sha256=checksum)
    if not files:
        raise ValueError(f"the command's checkpoint of step {step} is empty. To fix: say it when the files are there")
    said = to_json(Manifest(step=step, files=files, meta=meta))
    (folder / MANIFEST).write_text(json.dumps({"sha256": digest(said, length=64), **said}, indent=1))
    _sync(folder / MANIFEST)
    _sync(folder)


def _point_latest(root: Path, name: str) -> None:
    aside = root / "latest.tmp"
    aside.write_text(name)
    _sync(aside)
    aside.rename(root / "latest")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
