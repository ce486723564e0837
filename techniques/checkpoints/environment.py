"""The libraries, the devices and the layout of which the bits of trained weights may depend."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringmaster.distribution import DISTRIBUTION

if TYPE_CHECKING:
    import torch

LIBRARIES = {
    "ringmaster": DISTRIBUTION,
    "torch": "torch",
    "transformers": "transformers",
    "peft": "peft",
    "bitsandbytes": "bitsandbytes",
}
"""The packages on which the bits of trained weights may depend, and their distributions."""


@dataclass(frozen=True, kw_only=True)
class TrainingEnvironment:
    """What trained some steps of a job, as far as the bits of the result may depend on it.

    technique: its dotted path. config: its knobs. num_devices: the size of the gang.
    device: the kind of device. num_threads: of each rank. versions: of `LIBRARIES`, or of all that is installed.
    """

    technique: str
    config: Mapping[str, Any]
    num_devices: int
    device: str
    num_threads: int
    versions: Mapping[str, str]


def present_environment(
    *, technique: str, config: Mapping[str, Any], num_devices: int, device: torch.device, lists_all: bool = False
) -> TrainingEnvironment:
    """Returns the environment of this process, a rank that trains on `device`.

    lists_all: whether it has the versions of Python and of all that is installed, in place of those of `LIBRARIES`.
    """
    import torch

    is_gpu = device.type == "cuda"
    return TrainingEnvironment(
        technique=technique,
        config=dict(config),
        num_devices=num_devices,
        device=torch.cuda.get_device_name(device) if is_gpu else cpu_name(),
        num_threads=torch.get_num_threads(),
        versions=all_versions() if lists_all else versions(),
    )


def all_versions() -> Mapping[str, str]:
    """Returns the versions of Python and of all installed distributions, those of `LIBRARIES` by their names there."""
    known = {"python": platform.python_version()}
    for each in metadata.distributions():  # the first on the import path is the one that is imported
        known.setdefault(each.name.lower(), each.version)
    known.pop(DISTRIBUTION, None)
    return known | dict(versions())


@lru_cache(maxsize=1)
def versions() -> Mapping[str, str]:
    """Returns the versions of those of `LIBRARIES` that are installed."""
    result = {}
    for name, distribution in LIBRARIES.items():
        with suppress(metadata.PackageNotFoundError):
            result[name] = metadata.version(distribution)
    return result


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """Returns the model of the CPU and the vector instructions that PyTorch uses there."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    import torch

    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
