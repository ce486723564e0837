"""Preflight of jobs: prepares their data, sizes their models, and lists the options that could train them."""

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ringmaster.codec import from_json, to_json
from ringmaster.errors import StepError
from ringmaster.techniques import registry
from ringmaster.techniques.black_box import BlackBox
from ringmaster.techniques.data import PreparedData, fetch, open_data, prepare
from ringmaster.techniques.data.inference import architecture_of
from ringmaster.techniques.data.row_kind import retriever_of
from ringmaster.techniques.data.stored_source import progress_to
from ringmaster.techniques.estimates.device_rates import start_gpu_children
from ringmaster.techniques.estimates.memory import copies_reference
from ringmaster.techniques.estimates.time_estimate import Estimator, describe
from ringmaster.techniques.job import DISTILLED, PRUNED, Job
from ringmaster.techniques.job_specs import VIRTUAL_TOKENS, DataSpec
from ringmaster.techniques.loss import loss_function
from ringmaster.techniques.metric import why_generating
from ringmaster.techniques.model_facts import ModelFacts, default_loss, why_no_attention
from ringmaster.techniques.models.adapters import attach
from ringmaster.techniques.models.architectures import note_on_classes
from ringmaster.techniques.models.build import check_weights, skeleton
from ringmaster.techniques.models.facts import model_facts
from ringmaster.techniques.preflight_result import Candidate, Preflight, PreflightOrder, Refusal
from ringmaster.techniques.probing import TinyStepResult, explained, probe
from ringmaster.techniques.processes import gang_events
from ringmaster.techniques.processes.channel import Channel
from ringmaster.techniques.processes.ranks import show_gpus
from ringmaster.techniques.technique import (
    GangShape,
    Technique,
    choose_chunk,
    why_no_optimizer,
    why_not_exact,
)
from ringmaster.techniques.training.callbacks import callback_classes, further_configs
from ringmaster.techniques.training.optimizers import check_options, freeze, parameter_settings
from ringmaster.text import message_of

ROOM_TO_SPARE = 4  # factor over weights, gradients and optimizer state, which leaves memory for activations


def main(channel: Channel, argument: dict[str, Any]) -> int:
    """Sends PreflightDone or PreflightFailed for each job; the entry point of a worker process."""
    order = from_json(PreflightOrder, argument)
    if any(slot.kind == "gpu" for slot in order.slots):
        start_gpu_children()
    show_gpus(())
    sys.path.extend(path for path in order.import_paths if path not in sys.path)
    if order.cores:
        os.sched_setaffinity(0, order.cores)
    for job in order.jobs:
        channel.send(gang_events.event_to_json(gang_events.PreflightStarted(job=job.name)))
        try:
            with progress_to(partial(_report, channel, job)):
                preflight = preflight_job(job, order)
        except StepError as fault:
            channel.send(gang_events.event_to_json(gang_events.PreflightFailed(job=job.name, message=str(fault))))
        except Exception as error:  # noqa: BLE001 - models and data of users may raise anything; other jobs continue
            traceback.print_exc()
            message = f"{type(error).__name__}: {message_of(error)}"
            channel.send(gang_events.event_to_json(gang_events.PreflightFailed(job=job.name, message=message)))
        else:
            channel.send(gang_events.event_to_json(gang_events.PreflightDone(preflight=preflight)))
    return 0


def _report(channel: Channel, job: Job, progress: str) -> None:
    channel.send(gang_events.event_to_json(gang_events.DataProgress(job=job.name, progress=progress)))


def preflight_job(job: Job, order: PreflightOrder) -> Preflight:
    """Returns the candidates and refusals of one job. Raises StepError where it cannot take a step."""
    with explained("data: it cannot be read", "correct data"):
        described = describe(job) if order.describe_data else None
        job = replace(job, data=_readable(job.data, order))
        data = described or prepare(job.data, cache_dir=Path(order.cache_dir))
    if job.trains and job.name not in order.evaluated and data.training_faults:
        raise StepError([*data.training_faults])
    tried: TinyStepResult | None = None
    if not job.made_by and not job.is_black_box:
        _probe_parts(data, cache_dir=Path(order.cache_dir))
        tried = probe(job, data=data, cache_dir=Path(order.cache_dir), is_there=described is None)
        _check_training(job, data)
        _check_weights(job, data, order.weights)
    for callback in callback_classes():
        callback.check_weights(job, data, order.weights)
    facts = model_facts(job.model, data=data, adapter=job.adapter, frozen=job.freeze, base_changes=job.base_changes)
    if tried is not None:
        facts = with_probe(facts, tried, job)
    if job.adapter is not None and facts.decoder is not None and (more := _other_columns(job, data, order)):
        facts = replace(facts, undivided=facts.undivided or f"samples have {', '.join(more)} besides their tokens")
    if job.adapter is not None and data.images:
        facts = replace(facts, undivided=facts.undivided or "samples have images besides their tokens")
    job = replace(job, exact_chunk=choose_chunk(job, facts))
    estimator = Estimator(job, facts=facts, data=to_json(data), order=order)
    candidates: list[Candidate] = []
    refusals: list[Refusal] = []
    names = job.techniques or order.techniques
    # A technique that only the job names is one for groups, and gives that as its reason.
    techniques = {name: registry.load(order.techniques.get(name) or registry.dotted_path(name)) for name in names}
    if job.made_by and job.techniques is None:  # reasons of techniques that train would be useless
        techniques = {name: technique for name, technique in techniques.items() if isinstance(technique, BlackBox)}
    for shape in order.shapes:
        if job.num_devices is not None and shape.num_devices not in job.num_devices:
            continue
        listed: dict[str, list[Candidate]] = {}
        for name, technique in techniques.items():
            reason = (
                _black_box(technique, job)
                or why_no_adaptation(technique, job)
                or why_no_attention(job, device_kind=shape.kind)
                or next((why for each in job.features if (why := each.why_not_on(shape.kind))), None)
                or why_no_generation(technique, job)
                or why_no_optimizer(technique, job)
                or technique.supports(job, shape, facts)
                or why_not_exact(technique, job, shape, facts)
                or (None if order.forecast_all else _needless(technique, listed, shape))
            )
            listed[name], too_large = ([], []) if reason else estimator.weigh(technique, shape)
            if not listed[name]:
                least = _least_too_large(too_large, shape, job)
                refusals.append(
                    Refusal(
                        technique=name,
                        num_devices=shape.num_devices,
                        reason=reason or least,
                        is_too_large=reason is None,
                    )
                )
            refusals += [refusal for refusal, _ in too_large]
            refusals += [
                Refusal(technique=name, num_devices=shape.num_devices, reason=why, config=further)
                for further, why in further_configs(job, technique, device_kind=shape.kind)
                if why
            ]
        candidates += [candidate for group in listed.values() for candidate in group]
    base = order.weights.get(job.name)
    note = note_on_classes(job.model, data, None if base is None else Path(base)) if job.trains else None
    return Preflight(
        job=job.name,
        data=to_json(data if note is None else replace(data, notes=(*data.notes, note))),
        facts=facts,
        candidates=tuple(candidates),
        refusals=tuple(refusals),
        exact_chunk=job.exact_chunk,
        workers=num_workers(job, order.shapes),
    )


def _probe_parts(data: PreparedData, *, cache_dir: Path) -> None:
    """Raises StepError with the faults of all jobs that train a common component; each takes a tiny step on its own."""
    faults: list[str] = []
    for part in data.parts:
        job = from_json(Job, part["job"])
        try:
            probe(job, data=from_json(PreparedData, part["data"]), cache_dir=cache_dir)
        except StepError as fault:
            faults += [f"job {job.name}: {each}" for each in fault.faults]
    if faults:
        raise StepError(faults)


def _readable(spec: DataSpec, order: PreflightOrder) -> DataSpec:
    """Returns the data with the folder of the store that a job has made, or of the passages that one will encode."""
    retriever = retriever_of(spec)
    if retriever is None or retriever.passages is None:
        return spec
    made = order.weights.get(retriever.store)
    passages = from_json(DataSpec, retriever.passages)
    return spec.reading(store=made or prepare(passages, cache_dir=Path(order.cache_dir)).folder)


def num_workers(job: Job, gangs: Sequence[GangShape]) -> int:
    """Returns the workers with optimizers of their own: as many as devices of the largest gang can share the batch."""
    sizes = [gang.num_devices for gang in gangs if job.num_devices is None or gang.num_devices in job.num_devices]
    return max((size for size in sizes if job.global_batch_size % size == 0), default=1)


def with_probe(facts: ModelFacts, result: TinyStepResult, job: Job) -> ModelFacts:
    """Returns the facts of a model with the results of a tiny step, which has no adapter."""
    return replace(facts, whole_batch=result.undivided, has_dropout=result.sites.draws or job.adapter_drops_out)


def _check_training(job: Job, data: PreparedData) -> None:
    """Raises StepError where the model has no parameters as `freeze` and the optimizer name them."""
    with explained(f"optimizer {job.optimizer.name}: it cannot be built", "correct its options"):
        check_options(job)
    optimizer = job.optimizer
    if not job.freeze and not optimizer.groups and optimizer.layer_decay is None and optimizer.name != "muon":
        return
    with explained("optimizer: it does not suit the model", "correct its settings"):
        model = skeleton(job.model, data)
        if job.adapter is not None:
            attach(model, job.adapter, seed=0)
        if job.freeze:
            freeze(model, job.freeze)
        parameter_settings(job, model)


def _check_weights(job: Job, data: PreparedData, folders: Mapping[str, str]) -> None:
    """Raises StepError where the files of the job's model or its base do not have the model's tensors."""
    base = folders.get(job.name)
    with explained("model: its weights cannot be read", "save the model again"):
        check_weights(job.model, data=data, weights_from=None if base is None else Path(base))


def _other_columns(job: Job, data: PreparedData, order: PreflightOrder) -> list[str]:
    """Names of sample columns other than tokens and labels, such as a padding mask.

    A technique that packs samples does not pass these columns to the model.
    """
    names = {tensor.name for tensor in data.tensors}
    if not names and not order.describe_data:  # otherwise the data need not be there
        training, _ = open_data(job.data, cache_dir=Path(order.cache_dir), prepared=data)
        names = set(fetch(training, [0]))
    return sorted(names - {"input_ids", "labels"})


def _black_box(technique: Technique, job: Job) -> str | None:
    """Why a technique that lays models out cannot train the model of a command, or None."""
    if not job.is_black_box or isinstance(technique, BlackBox):
        return None
    return "the model is a command's, which trains it on its own"


def _needless(technique: Technique, result: Mapping[str, list[Candidate]], shape: GangShape) -> str | None:
    """Why a technique whose only benefit is less memory needs no trial, or None."""
    plainer = result.get(technique.saves_memory_of or "")
    if plainer and ROOM_TO_SPARE * plainer[0].least_bytes <= shape.memory_bytes:
        return f"{technique.saves_memory_of} fits with memory to spare, and this one communicates no less"
    return None


def _least_too_large(too_large: Sequence[tuple[Refusal, int]], shape: GangShape, job: Job) -> str:
    least = min((num_bytes for _, num_bytes in too_large), default=0)
    chunk = f", in chunks of {job.exact_chunk} samples (exact_chunk sets the chunk)" if job.is_exact else ""
    return f"needs {least / 2**30:.1f} GiB of {shape.memory_bytes / 2**30:.1f} a device at the least{chunk}"


def why_no_adaptation(technique: Technique, job: Job) -> str | None:
    """Returns why a technique cannot make the adaptation of a job, or None."""
    if isinstance(technique, BlackBox):
        return None  # their `supports` checks the adaptation
    if job.made_by:
        return f"the job trains no step: {job.made_by} is for it"
    if copies_reference(job) and DISTILLED not in technique.adaptations:
        return f"the loss {job.loss} needs a copy of the initial weights, which {technique.name} has not"
    if reasons := [reason for each in job.features if (reason := each.why_not(technique)) is not None]:
        return reasons[0]
    if job.adapter is not None and job.adapter.dora and not technique.whole_layers:
        return f"a DoRA needs the lengths of whole weights, which {technique.name} divides"
    needed = {
        DISTILLED: "a teacher in addition to the whole output of each row",
        PRUNED: "gradients that are masked between their exchange and the optimizer",
    }
    kind = "" if job.adaptation is None else job.adaptation.kind
    if kind not in needed or kind in technique.adaptations:
        return None
    return f"a {kind} model needs {needed[kind]}, which {technique.name} has not"


def why_no_generation(technique: Technique, job: Job) -> str | None:
    """Returns why a technique cannot write the texts on which a job's loss or metrics are computed, or None."""
    if isinstance(technique, BlackBox):
        return None
    loss = loss_function(job.loss, job.loss_options)
    metric = None if default_loss(architecture_of(job.model) or "") else why_generating(job.evaluation.metrics)
    what = f"the loss {loss.name}" if loss is not None and loss.num_written_tokens else metric
    if what is None:
        return None
    if not technique.generates:
        return f"{what} generates with the whole model on each device, which {technique.name} has not"
    if job.compile:
        return f"{what} generates sequences that grow, for each of which layers would be compiled again"
    if job.adapter is not None and job.adapter.kind in VIRTUAL_TOKENS:
        return f"{what} generates with a cache of keys and values, to which a {job.adapter.kind} is not added"
    return None
