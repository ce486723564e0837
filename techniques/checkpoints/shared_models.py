"""Finished models in the object store of their job's checkpoints, so that machines need no common folder.

    ROOT/model/manifest.json            the files' sizes and SHA-256, written last
               config.json ...

The node that trains a job exports its model to a folder, and stores it. A machine that needs the model, and does not
have the folder, copies it from the store.
"""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from ringmaster.errors import ModelNotFound
from ringmaster.techniques.checkpoints.checkpoint import (
    CheckpointFile,
    CheckpointManifest,
    publish_once,
    read_manifest,
    stored_manifest,
    write_described,
)
from ringmaster.techniques.checkpoints.storage import MANIFEST, CheckpointRoot, LocalPlace, place_of


def store_model(folder: Path, url: str) -> None:
    """Stores the files of a folder below a URL; what was there before is removed. Raises OSError."""
    place, name = _place_and_name(url)
    place.remove(name)
    local, files = LocalPlace(folder), dict[str, CheckpointFile]()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        path = file.relative_to(folder).as_posix()
        files[path] = write_described(place, f"{name}/{path}", local.blocks(path))
    place.write(f"{name}/{MANIFEST}", [stored_manifest(CheckpointManifest(step=0, files=files))])


def fetch_model(url: str, folder: Path) -> None:
    """Copies a stored model to `folder`, unless it is there; the processes of a machine do so once.

    Raises ModelNotFound, or OSError where the store or the disk fails.
    """

    def copy_files(aside: Path) -> None:
        place, name = _place_and_name(url)
        manifest = read_manifest(place, name)
        if manifest is None:
            raise ModelNotFound(
                f"the model in {folder} is not on this machine, and {url} does not hold it. To fix: share the folder "
                "between the machines"
            )
        for path, stored in manifest.files.items():
            LocalPlace(aside).write(path, _checked(place, f"{name}/{path}", stored))

    publish_once(folder, copy_files)


def _checked(place: CheckpointRoot, path: str, stored: CheckpointFile) -> Iterator[bytes]:
    value = sha256()
    for block in place.blocks(path):
        value.update(block)
        yield block
    if value.hexdigest() != stored.sha256:
        raise ModelNotFound(f"{place.location(path)} is damaged. To fix: train the job in a new run")


def _place_and_name(url: str) -> tuple[CheckpointRoot, str]:
    root, _, name = url.rpartition("/")
    return place_of(root), name
