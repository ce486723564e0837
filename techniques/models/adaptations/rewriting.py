"""Runs jobs without steps: reads the parents' weights, rewrites and exports them, and measures the result."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringmaster.codec import from_json, to_json
from ringmaster.techniques.data import PreparedData, prepare
from ringmaster.techniques.interface.job import MERGED, PRUNED, QUANTIZED
from ringmaster.techniques.models import build_model, export_model
from ringmaster.techniques.models.adaptations.comparing import compare
from ringmaster.techniques.models.adaptations.folders import quantization_of
from ringmaster.techniques.models.adaptations.merging import merge
from ringmaster.techniques.models.adaptations.pruning import prune
from ringmaster.techniques.models.adaptations.quantizing import export_quantized, quantize
from ringmaster.techniques.runtime.commands.running import WAITING_PATIENCE_S, wait_for_stop
from ringmaster.techniques.runtime.processes.events import Measured, Ready
from ringmaster.techniques.runtime.processes.order import GangOrder
from ringmaster.techniques.runtime.processes.ranks import join
from ringmaster.techniques.runtime.processes.reporter import Reporter

READING_PATIENCE_S = 600.0
LEAST_STEP_S = 1e-6  # reported as the time of a step, as there are no steps


def run(order: GangOrder, reporter: Reporter) -> dict[str, Any]:
    """Rewrites and exports the model, then measures it beside its parents.

    Returns the keys of `segment_loop.train`, and `compared`.
    """
    assert order.model_dir is not None
    folder = Path(order.model_dir)
    reporter.phase("reading the parents", patience_s=READING_PATIENCE_S)
    ranks = join(order, 0, num_ranks=1, axes={})
    startup_s = time.monotonic() - order.ordered_at_s
    reporter.send(Ready(step=0, startup_s=startup_s))
    _rewrite(order, folder, beat=reporter.beat, is_trial=False)
    started_s = time.perf_counter()
    compared = compare(order, ranks, reporter, folder=folder)
    return {
        "status": "done",
        "first_step": 0,
        "step": 0,
        "startup_s": startup_s,
        "metrics": dict(compared[0].metrics),
        "compared": to_json(compared),
        "evaluate_s": time.perf_counter() - started_s,
    }


def profile(order: GangOrder, reporter: Reporter) -> dict[str, Any]:
    """Runs the whole job once with fresh weights, as the parents may not be trained yet; that takes as long."""
    reporter.phase("trying", patience_s=READING_PATIENCE_S)
    ranks = join(order, 0, num_ranks=1, axes={})
    scratch = Path(order.folder) / "scratch"
    reporter.send(Ready())
    began_s = time.monotonic()
    _rewrite(order, scratch / "model", beat=reporter.beat, is_trial=True)
    rewritten_s = time.monotonic()
    compare(order, ranks, reporter, folder=scratch / "model")
    num_models = 1 + len(order.job.parents)  # the parents may not exist yet: the time of the model stands for theirs
    measured = {
        "step_s": LEAST_STEP_S,
        "startup_s": max(began_s - order.ordered_at_s, 0.0),
        "peak_bytes": _peak(ranks.device),
        "export_s": rewritten_s - began_s,
        "evaluate_s": (time.monotonic() - rewritten_s) * num_models,
    }
    shutil.rmtree(scratch)
    reporter.phase("waiting for its neighbours", patience_s=WAITING_PATIENCE_S)
    reporter.send(Measured(profile=measured))
    wait_for_stop(reporter)
    return {"status": "done"}


def _rewrite(order: GangOrder, folder: Path, *, beat: Callable[[], None], is_trial: bool) -> None:
    """Writes the job's model to `folder`.

    In a trial (`is_trial`), a fresh model replaces each parent whose folder the order lacks.
    """
    job, said = order.job, order.job.adaptation
    assert said is not None and not job.trains
    cache = Path(order.cache_dir)
    pinned = from_json(PreparedData, order.data) if order.data else None
    prepared = prepare(job.data, cache_dir=cache, pinned=pinned)

    def read(folder: str | None, *, is_named: bool) -> nn.Module:
        assert folder is not None or is_trial or not is_named, "a parent's folder was not ordered"
        if folder is not None and quantization_of(Path(folder)) is not None:
            raise ValueError(
                f"the model in {folder} is quantized, and a quantized model is not rewritten further. "
                f"To fix: take what it was quantized from, and quantize the result"
            )
        model = build_model(job.model, data=prepared, seed=job.seed, weights_from=Path(folder) if folder else None)
        beat()
        return model

    if said.kind == MERGED:
        parents = (read(order.parents.get(parent), is_named=True) for parent in said.parents)
        base = None if job.base is None else read(order.weights_from, is_named=True)
        model = merge(base, parents, said, beat=beat)
    else:
        # Without a base, the model that `model.from_pretrained` names is rewritten.
        model = read(order.weights_from, is_named=job.base is not None)
    if said.kind == QUANTIZED:
        assert said.method is not None
        names = quantize(model, said)
        export_quantized(folder, spec=job.model, model=model, names=names, method=said.method, prepared=prepared)
        return
    if said.kind == PRUNED:
        prune(model, said)
    export_model(folder, spec=job.model, model=model, state=model.state_dict(), prepared=prepared)


def _peak(device: torch.device) -> int:
    """Returns the peak of allocated bytes of a GPU, or of this process's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
