"""The environment of ranks: their variables, their import path, and where they find programs."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from ringmaster.distribution import DISTRIBUTION
from ringmaster.techniques.processes.caches import own_caches

IMPORT_ROOT = Path(__file__).absolute().parents[3]
"""The folder from which our packages are imported."""


def linked_package(folder: Path) -> Path:
    """Makes a folder with a link to Ringmaster, for another Python that must find nothing else of what is here."""
    linked = folder / "ringmaster-only"
    linked.mkdir(exist_ok=True)
    sources = [IMPORT_ROOT / "ringmaster"]
    try:
        installed = Path(str(distribution(DISTRIBUTION).locate_file("")))
        sources += installed.glob(f"{DISTRIBUTION.replace('-', '_')}-*.dist-info")  # with its version and entry points
    except PackageNotFoundError:  # a checkout that is not installed
        pass
    for source in sources:
        with suppress(FileExistsError):
            (linked / source.name).symlink_to(source)
    return linked


def first_in_path(python: str) -> str:
    """Returns the PATH of this process with the folder of a Python and of its programs before all others."""
    return os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])


def rank_environment(*, import_root: Path = IMPORT_ROOT) -> dict[str, str]:
    """Returns this process's environment with changes for ranks.

    Our packages come first on the import path, ranks start with one thread until they know their cores, telemetry is
    off, and libraries compile code where no other user can place any.

    import_root: the folder from which they import our packages.
    """
    paths = [str(import_root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        **own_caches(),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "OMP_NUM_THREADS": "1",
        # How often a thread of OpenMP looks for work before it sleeps. By default it spins for milliseconds: where
        # other processes need the cores too, two threads then take up to 25 times as long; with this limit twice as
        # long as one. On cores of their own both limits are equally fast.
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "5000"),
        # Code that checks whether there is a GPU, such as transformers at its import, would open a context on one,
        # after which children of this process could use none. By NVML nothing is opened.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # Otherwise MKL's order of summation on AMD CPUs depends on the memory address of a result, and a job that is
        # resumed, or trained in a group, would not end with the same bits.
        "MKL_CBWR": os.environ.get("MKL_CBWR", "AUTO"),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "true",
        # A gang on one machine communicates over loopback.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
