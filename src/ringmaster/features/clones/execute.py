"""The request for a clone: a job like another one of a batch that runs, with other settings.

A clone has its source's speed and size, so it needs no profile of its own: it differs in the keys of `SAME_SHAPE` only.
A warm one continues from a checkpoint of its source, which is linked into the clone's own folder, as its source removes
older checkpoints. Training from it is equal, bit by bit, to training on from the checkpoint under the changed settings:
weights, optimizer and position in the data come from it, and learning rate and schedule from the clone.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringmaster.errors import CheckpointNotFound, RequestRefused
from ringmaster.tasks.control.batch_terms import USUAL, ActiveBatch
from ringmaster.tasks.control.job_changes import step_jump, with_settings
from ringmaster.tasks.control.request_handler import RequestHandler
from ringmaster.tasks.execution.job_rows import JobTableEntry
from ringmaster.techniques.checkpoints.checkpoint import link_checkpoint
from ringmaster.techniques.checkpoints.storage import LocalStorage, is_url
from ringmaster.techniques.job_features import FirstCheckpoint

CLONE = "clone"
"""The kind of request. It adds a job with the name `name` that differs from the only one of `jobs` in `settings`, by
dotted key. A clone that `is_warm` continues from its source's checkpoint of `at_step`, or its newest one. If it
`is_dry`, the answer alone is requested: the `price` and the `jump` of the step.
"""
START = "start"  # the folder of a clone's checkpoints with that of its source


def clone(handler: RequestHandler, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Prices a clone of a job and, unless it is a dry request, starts it."""
    requested, is_warm, is_dry = content.get("jobs") or (), content.get("is_warm"), content.get("is_dry")
    if len(requested) != 1:
        raise RequestRefused(f"a clone has one source, got {', '.join(map(str, requested)) or 'none'}")
    batch, (source,) = handler.jobs_of(content, verb="cloned", fits=lambda record: True)
    name, settings = str(content.get("name", "")), content.get("settings") or {}
    table, of_source, of_clone = handler.executor.job_table, batch.qualified(source), batch.qualified(name)
    entry, record = table.entries.get(of_source), table.records.get(of_clone)
    if entry is None or not table.profiles[of_source]:
        raise RequestRefused(f"{source} cannot be trained here, so it cannot be cloned")
    if record is not None and record.variation is not None and record.variation.job == source:
        return {"message": f"{name} is a clone of {source}"}  # this request, before the controller died
    if record is not None or not name:
        raise RequestRefused(f"batch {batch.name} has a job {name!r} already. To fix: choose another --name")
    try:
        job = with_settings(entry.job_in_batch, settings, name=name)
    except ValueError as error:
        raise RequestRefused(f"these settings make no job: {error}") from error
    begun = job.started_from
    job = job.with_start(begun)
    batch_jobs, jump, origin = {*batch.job_names}, "", "from its first step"
    step = 0 if begun is None else begun.step
    if is_warm:
        step = warm_step(entry, at_step=content.get("at_step"))
    if job.trains and job.total_steps <= step:
        raise RequestRefused(f"num_steps must be more than the {step} of the checkpoint, got {job.total_steps}")
    if is_warm:
        jump, origin = step_jump(entry.job_in_batch, job, step=step), f"from its checkpoint of step {step}"
        start = start_root(entry, name)
        job = job.with_start(FirstCheckpoint(checkpoints=str(start), step=step))
        if not is_dry:
            try:
                link_checkpoint(Path(entry.paths.checkpoint_dir(entry.job_in_batch)), step, to=start)
            except CheckpointNotFound as error:
                raise RequestRefused(f"{error}. To fix: clone it again") from error
    renamed = job.renamed(of_clone, lambda other: batch.qualified(other) if other in batch_jobs else other)
    price = handler.executor.price(renamed, source=of_source, step=step)
    if not is_dry:
        _inherit_terms(handler, batch, source, name)
        why = f"{of_clone} is a clone of {of_source}"
        handler.executor.add_variant(of_clone, job, source=of_source, step=step if is_warm else None, why=why)
    words = "it waits for others, so its price is not known yet" if price is None else price.in_words()
    return {
        "message": f"{name}: a clone of {source} {origin}: {words}",
        "price": None if price is None else {
            "least_s": price.least_s, "most_s": price.most_s, "ends_s": price.ends_s,
            "delays_s": dict(price.delays_s),
        },
        "jump": jump,
    }  # fmt: skip


REQUESTS = {CLONE: clone}


def _inherit_terms(handler: RequestHandler, batch: ActiveBatch, source: str, name: str) -> None:
    """Gives a clone the priority, the weight and the user of its source."""
    like = batch.changes.get("like", {})
    changes = {**batch.changes, "like": {**like, name: like.get(source, source)}}
    priorities = {**batch.priorities, name: batch.priorities.get(source, USUAL)}
    handler.store_terms(replace(batch, priorities=priorities, changes=changes), why="")


def warm_step(source: JobTableEntry, *, at_step: Any) -> int:
    """Returns the step of the checkpoint from which a clone continues. Raises RequestRefused where there is none."""
    job, root = source.job_in_batch, source.paths.checkpoint_dir(source.job_in_batch)
    if job.is_black_box:
        raise RequestRefused(f"{job.name} has no checkpoints that Ringmaster can read. To fix: leave out --warm")
    if is_url(root):
        remedy = "To fix: leave out --warm, or keep checkpoints in a folder"
        raise RequestRefused(
            f"the checkpoints of {job.name} are in {root}, where none can be kept for a clone. {remedy}"
        )
    steps = [
        int(name.rpartition("-")[2]) for name in LocalStorage(Path(root)).names() if name.rpartition("-")[2].isdigit()
    ]
    if not steps:
        raise RequestRefused(f"{job.name} has no checkpoint yet. To fix: wait for one, or leave out --warm")
    if at_step is None:
        return max(steps)
    if at_step not in steps:
        there = ", ".join(map(str, sorted(steps)))
        remedy = "To fix: choose one of these; keep_checkpoints of the batch keeps more"
        raise RequestRefused(f"{job.name} has no checkpoint of step {at_step}, only of: {there}. {remedy}")
    return int(at_step)


def start_root(source: JobTableEntry, name: str) -> Path:
    """Returns the folder of a clone's checkpoints in which its source's checkpoint is kept."""
    return Path(source.paths.checkpoint_dir(replace(source.job_in_batch, name=name))) / START
