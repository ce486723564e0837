"""A report on jobs that need not be submitted: which techniques fit, and in how much memory.

It needs neither weights nor a GPU.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ringmaster.codec import to_json
from ringmaster.errors import InputError, input_errors
from ringmaster.flows.batch.job_checks import preflights_of
from ringmaster.flows.output import error_console, output_console, plain_table, print_lines, styled
from ringmaster.tasks.batch import Batch, load_batch, parse_batch
from ringmaster.tasks.batch.document import read
from ringmaster.tasks.cluster import detect
from ringmaster.tasks.profiling.preflight_runs import gang_shape, slots_of
from ringmaster.techniques import GangShape
from ringmaster.techniques.preflight_result import Candidate, Preflight
from ringmaster.techniques.processes.order import Slot

TIMEOUT_S = 60.0  # time for memory estimates; the rest are computed by formula, and estimated by the next call
UNITS = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True, kw_only=True)
class TechniqueReport:
    """The preflights of jobs.

    shapes: one gang shape for each gang size.
    preflights: the preflights, by job name.
    faults: why some jobs have no preflight, by job name.
    """

    shapes: tuple[GangShape, ...]
    preflights: Mapping[str, Preflight]
    faults: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Returns what `techniques --model --json` prints."""
        return {
            "shapes": to_json(self.shapes),
            "jobs": [
                {"name": s.job, "candidates": to_json(_ordered(s)), "refused": to_json(s.refusals)}
                for s in self.preflights.values()
            ],
            "faults": dict(self.faults),
        }


def look_ahead(
    file: Path, *, job: str | None, num_devices: int | None, memory: str | None, num_nodes: int
) -> TechniqueReport:
    """Estimates the memory of every technique and config for the jobs of `file`.

    file: a batch file, or a file with one job.
    job: name of the only job to report; None for all.
    num_devices, memory: number and memory of GPUs that need not exist; None for the devices of this machine.
    num_nodes: number of nodes that these GPUs are spread over.

    Raises BatchFileError and InputError with every fault of the input.
    """
    batch = _batch(file)
    jobs = [each for each in batch.jobs if job in (None, each.name)]
    if not jobs:
        raise InputError([f"{file} has no job {job!r}; it has {', '.join(each.name for each in batch.jobs)}"])
    shapes, slots = _shapes(batch, num_devices, memory, num_nodes)
    with error_console().status(styled("estimating")):
        preflights, faults = preflights_of(
            batch,
            jobs,
            shapes=shapes,
            slots=slots,
            forecast_all=True,
            timeout_s=TIMEOUT_S,
            describe_data=True,
        )
    return TechniqueReport(shapes=shapes, preflights=preflights, faults=faults)


def print_technique_report(report: TechniqueReport) -> None:
    """Prints tables for each job: the configs that fit, the quickest by estimate first, and the others with reasons."""
    console = output_console()
    for preflight in report.preflights.values():
        candidates = _ordered(preflight)
        quickest_s = min((c.step_s for c in candidates if c.step_s is not None), default=None)
        memory_bytes = report.shapes[0].memory_bytes
        console.print(f"{preflight.job}: {len(candidates)} configs fit into {memory_bytes / 2**30:.1f} GiB a device")
        table = Table("technique", "devices", "config", box=None, header_style="bold", padding=(0, 2, 0, 0))
        for header in ("GiB a device", "GiB of host a device", "step"):
            table.add_column(header, justify="right")
        for c in candidates:
            memory = c.memory
            device_bytes = c.least_bytes if memory is None else memory.device_bytes
            host_bytes = 0 if memory is None else memory.host_bytes
            sign = "" if memory is not None and memory.source == "rehearsed" else "> " if memory is None else "~ "
            step = "" if c.step_s is None or quickest_s is None else f"{c.step_s / quickest_s:.2f}"
            row = [c.technique, str(c.num_devices), _knobs(c.config), f"{sign}{device_bytes / 2**30:.2f}"]
            table.add_row(*row, f"{host_bytes / 2**30:.2f}" if host_bytes else "", step)
        console.print(table)
        # A technique of which no config fits is listed once, not once for each config.
        whole = {(r.technique, r.num_devices) for r in preflight.refusals if r.config is None}
        out = [
            (r.technique, str(r.num_devices), _knobs(r.config or {}), r.reason)
            for r in preflight.refusals
            if r.config is None or (r.technique, r.num_devices) not in whole
        ]
        console.print(plain_table("out", "devices", "config", "why", rows=out))
    print_lines(console, [f"{name}: {fault}" for name, fault in report.faults.items()])


def _batch(file: Path) -> Batch:
    """Reads a batch file, or a file with one job."""
    data = read(file.read_text(encoding="utf-8")).data if file.is_file() else None
    if isinstance(data, dict) and "jobs" not in data and "grid" not in data and "model" in data:
        return parse_batch(json.dumps({"jobs": [{"name": file.stem, **data}]}), folder=file.parent, name=file.name)
    return load_batch(file)


def _shapes(
    batch: Batch, num_devices: int | None, memory: str | None, num_nodes: int
) -> tuple[tuple[GangShape, ...], tuple[Slot, ...]]:
    """Returns the gang shapes, and this machine's devices, if they are meant: their speed can be measured."""
    if (num_devices is None) != (memory is None):
        raise InputError(["--devices and --memory go together: how many GPUs, and how large each is"])
    if num_devices is not None and memory is not None:
        if num_devices % num_nodes:
            raise InputError([f"{num_devices} devices cannot be divided evenly over {num_nodes} nodes"])
        return (GangShape(kind="gpu", num_devices=num_devices, memory_bytes=_bytes(memory), num_nodes=num_nodes),), ()
    with input_errors():
        devices = detect(batch.devices).devices
    sizes = range(1, len(devices) + 1)
    return tuple(gang_shape(devices[:n]) for n in sizes), slots_of(devices)


def _bytes(text: str) -> int:
    result = re.fullmatch(r"([0-9.]+) ?([A-Za-z]+)", text.strip())
    if result is None or result[2] not in UNITS or result[1].count(".") > 1 or result[1] == ".":
        units = ", ".join(UNITS)
        raise InputError(
            [f"--memory {text!r} is not a valid amount of memory. To fix: write 80GiB, or a number with {units}"]
        )
    return int(float(result[1]) * UNITS[result[2]])


def _ordered(preflight: Preflight) -> tuple[Candidate, ...]:
    """Returns the candidates of each gang size with the quickest estimate first; unsorted if an estimate is missing."""
    if any(c.step_s is None for c in preflight.candidates):
        return preflight.candidates
    return tuple(sorted(preflight.candidates, key=lambda c: (c.num_devices, c.step_s)))


def _knobs(config: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in config.items())
