"""Memory estimates in child processes, run in parallel and cached: nothing is estimated twice on a machine.

A model of many equal layers is estimated with four and with five layers. Between the first two and the last two layers
a step repeats the same operations. So the peak of a phase is linear in the number of layers.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from ringmaster.codec import digest, from_json, to_json
from ringmaster.techniques import registry
from ringmaster.techniques.estimates.rank_memory import RankEstimate, RankScenario, estimate_rank
from ringmaster.techniques.job import EvaluationSpec, ScheduleSpec
from ringmaster.techniques.probing.probe import source_state, source_states

VERSION = 4  # incremented when estimates would have other results
FEW_LAYERS = (4, 5)
AT_EITHER_END = 2
PATIENCE_S = 180.0
IRRELEVANT_DATA = (
    "name",
    "digest",
    "num_samples",
    "num_held_out",
    "source",
    "folder",
    "lengths",
    "columns",
    "notes",
    "training_faults",
)


@dataclass(frozen=True, kw_only=True)
class EstimateError:
    """The reason why an estimate failed."""

    message: str


def estimate_ranks(
    scenes: Sequence[RankScenario], *, num_layers: int = 0, at_once: int = 1, until_s: float = math.inf
) -> list[RankEstimate | EstimateError]:
    """Estimates each scene: from the cache, or else in a child process, `at_once` of them in parallel.

    num_layers: layers of models that may be estimated with a few layers; 0 where none may.
    until_s: CLOCK_MONOTONIC time after which no estimate is started.
    """
    few = num_layers > FEW_LAYERS[-1] + 1
    wanted = [replace(_plain(s), num_layers=n) for s in scenes for n in (FEW_LAYERS if few else (None,))]
    missing = [(file, scene) for file, scene in {_file(scene): scene for scene in wanted}.items() if not file.exists()]
    _run(missing, at_once=at_once, until_s=until_s)
    found = [_read(_file(scene)) for scene in wanted]
    if not few:
        return found
    return [_with_layers(found[i], found[i + 1], num_layers) for i in range(0, len(found), 2)]


def _with_layers(
    fewer: RankEstimate | EstimateError, more: RankEstimate | EstimateError, num_layers: int
) -> RankEstimate | EstimateError:
    """Returns p(L) = p(4) + (L - 4) (p(5) - p(4)), for each phase near either end, and for the work."""
    if isinstance(fewer, EstimateError) or isinstance(more, EstimateError):
        return fewer if isinstance(fewer, EstimateError) else more
    times = num_layers - FEW_LAYERS[0]
    peaks = [dict(_at_the_ends(r.peaks, num)) for r, num in zip((fewer, more), FEW_LAYERS, strict=True)]
    return RankEstimate(
        peaks={phase: low + times * (peaks[1].get(phase, low) - low) for phase, low in peaks[0].items()},
        saved_bytes=_linear(fewer.saved_bytes, more.saved_bytes, times),
        num_flops=fewer.num_flops + times * (more.num_flops - fewer.num_flops),
        num_bytes=fewer.num_bytes + times * (more.num_bytes - fewer.num_bytes),
        num_operators=fewer.num_operators + times * (more.num_operators - fewer.num_operators),
    )


def _linear(fewer: int | None, more: int | None, times: int) -> int | None:
    return None if fewer is None or more is None else fewer + times * (more - fewer)


def _at_the_ends(peaks: Mapping[str, int], num_layers: int) -> Iterator[tuple[str, int]]:
    """Yields phases near either end by position: the first two layers, and the last two, counted from the end."""
    for phase, peak in peaks.items():
        kind, _, number = phase.partition(" ")
        if not number.isdigit() or int(number) < AT_EITHER_END:
            yield phase, peak
        elif int(number) >= num_layers - AT_EITHER_END:
            yield f"{kind} {int(number) - num_layers}", peak


def _plain(scene: RankScenario) -> RankScenario:
    """The scene without settings that do not affect it, so that jobs which differ only in these share an estimate."""
    job = replace(
        scene.job,
        name="rehearsal",
        base=None,
        adaptation=None,
        optimizer=replace(scene.job.optimizer, lr=1e-3, layer_decay=None, groups=(), decay_norms_and_biases=True),
        schedule=ScheduleSpec(),
        num_steps=10,
        num_epochs=None,
        evaluation=EvaluationSpec(),
        seed=0,
        techniques=None,
        num_devices=None,
    )
    return replace(scene, job=job, shape=replace(scene.shape, memory_bytes=0))


def _file(scene: RankScenario) -> Path:
    said = to_json(scene)
    folder = Path(said.pop("cache_dir")) / "rehearsals"
    if said["data"]["kind"] != "other":
        for key in IRRELEVANT_DATA:
            said["data"].pop(key, None)
    is_own = scene.technique not in registry.BUILTIN.values()
    said["code"] = [*source_states(scene.job), *([source_state(scene.technique)] if is_own else [])]
    return folder / f"{digest([said, torch.__version__, transformers.__version__, VERSION], length=32)}.json"


def _read(file: Path) -> RankEstimate | EstimateError:
    if not file.exists():
        return EstimateError(message="there was no time for the memory estimate; the next call continues")
    data = json.loads(file.read_text())
    return from_json(EstimateError, data) if "message" in data else from_json(RankEstimate, data)


def _keep(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(f".{os.getpid()}")
    aside.write_text(text)
    aside.rename(file)


def _run(missing: Sequence[tuple[Path, RankScenario]], *, at_once: int, until_s: float) -> None:
    left, running = list(missing), dict[int, tuple[Path, int]]()
    while running or (left and time.monotonic() < until_s):
        while left and len(running) < max(at_once, 1) and time.monotonic() < until_s:
            file, scene = left.pop(0)
            pid, pipe = _start(scene)
            running[pipe] = (file, pid)
        ready, _, _ = select.select(list(running), [], [], PATIENCE_S)
        for pipe in ready or list(running):
            file, pid = running.pop(pipe)
            _keep(file, json.dumps(_answer(pipe, pid, is_late=not ready)))


def _start(scene: RankScenario) -> tuple[int, int]:
    """Starts a child that estimates and writes its result into a pipe; returns its pid and the end to read from."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    status = 1
    try:
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
            answer = _told(scene)
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(answer))
        status = 0
    finally:
        os._exit(status)


def _told(scene: RankScenario) -> Any:
    torch.set_num_threads(1)
    try:
        return to_json(estimate_rank(scene))
    except Exception as error:  # noqa: BLE001 - a model that reads values may raise anything: reported
        return to_json(EstimateError(message=f"{type(error).__name__}: {error}"))


def _answer(pipe: int, pid: int, *, is_late: bool) -> Any:
    if is_late:
        os.kill(pid, signal.SIGKILL)
    with os.fdopen(pipe) as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    if is_late:
        return to_json(EstimateError(message=f"took longer than {PATIENCE_S:.0f} s"))
    if not text:
        print(f"a memory estimate ended with status {status}", file=sys.stderr)
        return to_json(EstimateError(message=f"the process ended with status {os.waitstatus_to_exitcode(status)}"))
    return json.loads(text)
