"""Data of a job: prepared once into memory-mapped Arrow files, then read in an order that no layout changes.

`prepare` does the slow work. `open_data` opens the training and the held-out samples. `sampler_of` selects the
samples of a step's global batch, and `fetch` stacks them. Importing this package does not import torch.
"""

from pathlib import Path

from ringmaster.techniques.data.arrow_files import Indices
from ringmaster.techniques.data.samples import LENGTH_GROUPED, fetch, num_tokens_of, sampler_of, width_of
from ringmaster.techniques.data.stored_source import DESCRIPTION
from ringmaster.techniques.data_source import SOURCES, Dataset, DataSource, PreparedData, check_same, data_source_of
from ringmaster.techniques.job_specs import SAMPLINGS, DataSpec

__all__ = [
    "SOURCES",
    "Dataset",
    "Indices",
    "PreparedData",
    "fetch",
    "num_tokens_of",
    "open_data",
    "prepare",
    "sampler_of",
    "width_of",
]


def prepare(spec: DataSpec, *, cache_dir: Path, pinned: PreparedData | None = None) -> PreparedData:
    """Does the slow work (training a tokenizer, tokenising) once for each content, under `cache_dir`.

    pinned: the result of an earlier `prepare`. It is returned where this machine has its folder, or it has none.

    Several processes may call it at the same time. Raises ValueError, with a remedy, where the data is unknown, empty,
    unreadable or too short, or has other samples than `pinned`.
    """
    source = _checked(spec)
    if pinned is not None and (not pinned.folder or Path(pinned.folder, DESCRIPTION).is_file()):
        return pinned
    result = source.prepare(spec, cache_dir=cache_dir)
    if pinned is not None:
        check_same(result, pinned)
    return result


def open_data(spec: DataSpec, *, cache_dir: Path, prepared: PreparedData | None = None) -> tuple[Dataset, Dataset]:
    """Opens the training and the held-out samples.

    prepared: the result of an earlier `prepare`. Exactly that data is opened, even if the files have changed since.

    Raises ValueError where the earlier data no longer exists (or is not on this machine) and the files now have other
    content.
    """
    return _checked(spec).open(spec, cache_dir=cache_dir, prepared=prepared)


def _checked(spec: DataSpec) -> DataSource:
    """Returns the data source of `spec`. Raises ValueError where `spec` is wrong in itself, before any data is read."""
    source = data_source_of(spec)
    kind = f"samples of kind {source.name}"
    for is_wrong, fault, remedy in (
        (not 0 <= spec.held_out < 1, f"held_out {spec.held_out} is not a share", "give 0 <= held_out < 1"),
        (
            spec.seq_len is not None and spec.seq_len < 2,
            f"seq_len {spec.seq_len} is too short to predict a token",
            "give 2 or more",
        ),
        (
            spec.sampling not in SAMPLINGS,
            f"sampling {spec.sampling!r} is unknown",
            f"give one of {', '.join(SAMPLINGS)}",
        ),
        (
            spec.sampling == LENGTH_GROUPED and not source.pads,
            f"{kind} have one length",
            "set sampling to random, or leave it out",
        ),
        (spec.packing and not source.packs, f"{kind} cannot be packed", "set packing to false, or leave it out"),
    ):
        if is_wrong:
            raise ValueError(f"data: {fault}. To fix: {remedy}")
    source.check(spec)
    return source
