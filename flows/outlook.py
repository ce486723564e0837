"""What could train a model, in how much memory, and why the rest could not: told without weights and without a GPU."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ringmaster.flows import settings
from ringmaster.flows.faults import InputError
from ringmaster.flows.output import error_console, output_console
from ringmaster.tasks.batch import Batch, load_batch, parse_batch
from ringmaster.tasks.batch.document import read
from ringmaster.tasks.cluster import detect
from ringmaster.tasks.profiling.stage import run_survey
from ringmaster.tasks.profiling.trials import gang_shape
from ringmaster.techniques import GangShape, registry
from ringmaster.techniques.engine.processes import ForkServer
from ringmaster.techniques.surveys import Candidate, Refusal, Survey, SurveyOrder
from ringmaster.techniques.values import to_json

PATIENCE_S = 60.0  # for rehearsals; what is left is told by arithmetic, and rehearsed by the next call
UNITS = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The surveys of jobs for one shape of gang each size, and why some could not be surveyed, by job name."""

    shapes: tuple[GangShape, ...]
    surveys: Mapping[str, Survey]
    faults: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """What `techniques --model --json` prints."""
        return {
            "shapes": to_json(self.shapes),
            "jobs": [
                {"name": s.job, "candidates": to_json(_ordered(s)), "refused": to_json(s.refusals)}
                for s in self.surveys.values()
            ],
            "faults": dict(self.faults),
        }


def look_ahead(file: Path, *, job: str | None, num_devices: int | None, memory: str | None, num_nodes: int) -> Outlook:
    """Foretells the memory of every technique and config that might train the jobs of `file`.

    num_devices and memory: GPUs that need not be there; without them, the devices that are.
    Raises BatchFileError and InputError with every fault of the input.
    """
    batch = _batch(file)
    jobs = [each for each in batch.jobs if job in (None, each.name)]
    if not jobs:
        raise InputError([f"{file} has no job {job!r}; it has {', '.join(each.name for each in batch.jobs)}"])
    shapes, slots = _shapes(batch, num_devices, memory, num_nodes)
    order = SurveyOrder(
        jobs=tuple(jobs),
        shapes=shapes,
        techniques=registry.dotted_paths(),
        cache_dir=str(settings.home() / "cache"),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        import_paths=(str(batch.folder),),
        slots=slots,
        forecast_all=True,
        patience_s=PATIENCE_S,
        describe_data=True,
    )
    console = error_console()
    preload = tuple(f"transformers:{each.model.architecture}" for each in jobs if each.model.architecture)
    with console.status("foretelling"), ForkServer(preload=preload) as server:
        surveys, faults = run_survey(order, server=server, notice=lambda _: None)
    return Outlook(shapes=shapes, surveys=surveys, faults=faults)


def print_outlook(outlook: Outlook) -> None:
    """A table for each job: what fits, the quickest-looking first where that is known; then what does not, and why."""
    console = output_console()
    for survey in outlook.surveys.values():
        candidates = _ordered(survey)
        quickest_s = min((c.step_s for c in candidates if c.step_s is not None), default=None)
        memory_bytes = outlook.shapes[0].memory_bytes
        console.print(f"{survey.job}: {len(candidates)} configs fit into {memory_bytes / 2**30:.1f} GiB a device")
        table = Table("technique", "devices", "config", box=None, header_style="bold", padding=(0, 2, 0, 0))
        for header in ("GiB a device", "GiB of host a device", "step"):
            table.add_column(header, justify="right")
        for c in candidates:
            forecast = c.forecast
            device_bytes = c.least_bytes if forecast is None else forecast.device_bytes
            host_bytes = 0 if forecast is None else forecast.host_bytes
            sign = "" if forecast is not None and forecast.source == "rehearsed" else "> " if forecast is None else "~ "
            step = "" if c.step_s is None or quickest_s is None else f"{c.step_s / quickest_s:.2f}"
            row = [c.technique, str(c.num_devices), _knobs(c.config), f"{sign}{device_bytes / 2**30:.2f}"]
            table.add_row(*row, f"{host_bytes / 2**30:.2f}" if host_bytes else "", step)
        console.print(table)
        out = Table("out", "devices", "config", "why", box=None, header_style="bold", padding=(0, 2, 0, 0))
        for refusal in _shortened(survey.refusals):
            out.add_row(refusal.technique, str(refusal.num_devices), _knobs(refusal.config or {}), refusal.reason)
        console.print(out)
    for name, fault in outlook.faults.items():
        console.print(f"{name}: {fault}", markup=False)


def _batch(file: Path) -> Batch:
    """A batch file, or a file with one job."""
    data = read(file.read_text(encoding="utf-8")).data if file.is_file() else None
    if isinstance(data, dict) and "jobs" not in data and "grid" not in data and "model" in data:
        text = json.dumps({"jobs": [{"name": file.stem, **data}]})
        return parse_batch(text, folder=file.parent, name=file.name)
    return load_batch(file)


def _shapes(
    batch: Batch, num_devices: int | None, memory: str | None, num_nodes: int
) -> tuple[tuple[GangShape, ...], tuple[tuple[int, ...], ...]]:
    """The gangs to look at, and the CPU slots whose speed is known because they are here."""
    if (num_devices is None) != (memory is None):
        raise InputError(["--devices and --memory go together: how many GPUs, and how large each is"])
    if num_devices is not None and memory is not None:
        if num_devices % num_nodes:
            raise InputError([f"{num_devices} devices cannot be divided evenly over {num_nodes} nodes"])
        memory_bytes = _bytes(memory)
        shape = GangShape(kind="gpu", num_devices=num_devices, memory_bytes=memory_bytes, num_nodes=num_nodes)
        return (shape,), ()
    try:
        devices = detect(batch.devices).devices
    except ValueError as error:
        raise InputError([str(error)]) from error
    sizes = range(1, len(devices) + 1)
    return tuple(gang_shape(devices[:n]) for n in sizes), tuple(d.cores for d in devices if d.kind == "cpu")


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9.]+) ?([A-Za-z]+)", text.strip())
    if found is None or found[2] not in UNITS or found[1].count(".") > 1 or found[1] == ".":
        units = ", ".join(UNITS)
        raise InputError([f"--memory {text!r} is no amount of memory. To fix: write 80GiB, or a number with {units}"])
    return int(float(found[1]) * UNITS[found[2]])


def _ordered(survey: Survey) -> tuple[Candidate, ...]:
    """The quickest-looking of each gang size first, where that is known; else as the techniques list them."""
    if any(c.step_s is None for c in survey.candidates):
        return survey.candidates
    return tuple(sorted(survey.candidates, key=lambda c: (c.num_devices, c.step_s)))


def _shortened(refusals: tuple[Refusal, ...]) -> Iterator[Refusal]:
    """A technique of which nothing fits once, not with each of its configs."""
    whole = {(r.technique, r.num_devices) for r in refusals if r.config is None}
    yield from (r for r in refusals if r.config is None or (r.technique, r.num_devices) not in whole)


def _knobs(config: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in config.items())
