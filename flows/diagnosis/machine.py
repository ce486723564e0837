"""What a machine is: versions, packages, operating system, cores, memory and GPUs."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

import psutil

from ringmaster.flows.diagnosis.bundle import Part

NAMED = ("ringmaster", "torch", "prefect", "mlflow", "transformers", "sqlalchemy", "psycopg", "fastapi", "nvidia-ml-py")
GPU_PATIENCE_S = 30.0  # a driver with a fault may not answer


def versions() -> Iterator[Part]:
    """Yields the versions of Ringmaster, Python and what it is built on."""
    found = {"python": sys.version, "executable": sys.executable, **{name: _version(name) for name in NAMED}}
    yield Part.of_json("versions.json", found)


def packages() -> Iterator[Part]:
    """Yields the installed packages in the form of `pip freeze`, with where those come from that have no index."""
    lines = set()
    for each in distributions():
        origin = each.read_text("direct_url.json")
        lines.add(f"{each.name}=={each.version}" + (f"  # {origin.strip()}" if origin else ""))
    yield Part(name="packages.txt", text="\n".join(sorted(lines, key=str.lower)) + "\n")


def machine(home: Path) -> Iterator[Part]:
    """Yields the operating system, cores, memory and disks of this machine. home: RINGMASTER_HOME."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    found: dict[str, Any] = {
        "system": platform.platform(),
        "os_release": platform.freedesktop_os_release().get("PRETTY_NAME", ""),
        "machine": platform.machine(),
        "cores": {"logical": psutil.cpu_count(), "physical": psutil.cpu_count(logical=False)},
        "cores_of_this_process": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "memory_bytes": {"total": memory.total, "available": memory.available, "swap": swap.total},
        "disk_bytes": {str(place): _disk(place) for place in (home, Path("/tmp"), Path("/dev/shm"))},
        "uptime_s": round(_uptime_s()),
    }
    yield Part.of_json("machine.json", found)


def nvidia() -> Iterator[Part]:
    """Yields what `nvidia-smi` says. Raises FileNotFoundError on a machine without it, and if it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        yield Part(name="nvidia-smi.txt", text="nvidia-smi is not installed on this machine\n")
        return
    done = subprocess.run([program], capture_output=True, text=True, timeout=GPU_PATIENCE_S, check=False)
    yield Part(name="nvidia-smi.txt", text=f"exit status {done.returncode}\n{done.stdout}{done.stderr}")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _disk(place: Path) -> dict[str, int] | None:
    """Returns the size of the disk of a folder and what is free of it; None if there is no such folder."""
    if not place.exists():
        return None
    usage = shutil.disk_usage(place)
    return {"total": usage.total, "free": usage.free}


def _uptime_s() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])
