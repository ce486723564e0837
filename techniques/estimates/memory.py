"""Predicted memory of an option: the peak of an estimated step of its ranks, before anything runs.

Estimates are made in child processes, in parallel, and cached: nothing is estimated twice on a machine. A model of many
equal layers is estimated with four and with five layers: between the first two and the last two layers a step repeats
the same operations, so the peak of a phase is linear in the number of layers.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from ringmaster.codec import digest, from_json, to_json
from ringmaster.files import write_value
from ringmaster.techniques import registry
from ringmaster.techniques.data import PreparedData
from ringmaster.techniques.estimates.device_rates import run_in_children
from ringmaster.techniques.estimates.rank_memory import RankEstimate, RankScenario, estimate_rank
from ringmaster.techniques.job import DISTILLED, PRUNED, Job
from ringmaster.techniques.job_specs import EvaluationSpec, ScheduleSpec
from ringmaster.techniques.loss import loss_function
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.models.facts import FP32_BYTES, model_facts
from ringmaster.techniques.models.model_folders import teacher_model
from ringmaster.techniques.preflight_result import ARITHMETIC, FROM_META_STEP, MemoryEstimate
from ringmaster.techniques.probing.probe import source_state, source_states
from ringmaster.techniques.technique import OPTIMIZER_STATE_BYTES, WEIGHT_BYTES, Config, GangShape, Technique

MASK_BYTES = 1  # of a weight's entry in a mask
CUBLAS_BYTES = 64 << 20  # of workspaces that cuBLAS allocates for the matrix products of a process
VERSION = 6  # incremented when estimates would have other results
FEW_LAYERS = (4, 5)
AT_EITHER_END = 2
USUAL_RANK = 16
# Rough share of the activations that is stored under each kind of recomputation.
KEPT = {"none": 1.0, "selective": 0.6, "full": 0.15}
# Along these axes ranks hold different state; along others they are alike.
UNEQUAL_AXES = ("pp", "cp")
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
    estimates = [_read(_file(scene)) for scene in wanted]
    if not few:
        return estimates
    return [_with_layers(estimates[i], estimates[i + 1], num_layers) for i in range(0, len(estimates), 2)]


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
        scene.job.plain,
        name="rehearsal",
        base=None,
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
    fields = to_json(scene)
    folder = Path(fields.pop("cache_dir")) / "rehearsals"
    if fields["data"]["kind"] != "other":
        for key in IRRELEVANT_DATA:
            fields["data"].pop(key, None)
    is_own = scene.technique not in registry.BUILTIN.values()
    fields["code"] = [*source_states(scene.job), *([source_state(scene.technique)] if is_own else [])]
    return folder / f"{digest([fields, torch.__version__, transformers.__version__, VERSION], length=32)}.json"


def _read(file: Path) -> RankEstimate | EstimateError:
    if not file.exists():
        return EstimateError(message="there was no time for the memory estimate; the next call continues")
    data = json.loads(file.read_text())
    return from_json(EstimateError, data) if "message" in data else from_json(RankEstimate, data)


def _run(missing: Sequence[tuple[Path, RankScenario]], *, at_once: int, until_s: float) -> None:
    works = [partial(_estimated, scene) for _, scene in missing]
    for number, estimate, fault in run_in_children(works, at_once=at_once, until_s=until_s):
        if fault:
            print(f"a memory estimate: {fault}", file=sys.stderr)
        write_value(estimate or EstimateError(message=fault), missing[number][0])


def _estimated(scene: RankScenario) -> Any:
    torch.set_num_threads(1)
    try:
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
            return to_json(estimate_rank(scene))
    except Exception as error:  # noqa: BLE001 - a model that reads values may raise anything: reported
        return to_json(EstimateError(message=f"{type(error).__name__}: {error}"))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A job with the results of its preflight.

    data: the JSON form of the prepared data.
    techniques: dotted paths by name.
    at_once: number of memory estimates that run in parallel.
    until_s: CLOCK_MONOTONIC time after which no estimate is started.
    """

    job: Job
    data: Mapping[str, Any]
    facts: ModelFacts
    techniques: Mapping[str, str]
    cache_dir: str
    at_once: int = 1
    until_s: float = math.inf


Choice = tuple[Technique, Config, GangShape]


def predict_memory(workload: Workload, choices: Sequence[Choice]) -> list[MemoryEstimate]:
    """Returns the bytes of device and host memory that each choice will need, and how they were determined.

    Where the step of a technique or model cannot be estimated, the technique's own arithmetic gives the state. The
    activations are then those of one device alone, times the share that this device computes.
    """
    scenes = [list(_scenes(workload, choice)) for choice in choices]
    results: dict[int, RankEstimate | EstimateError] = {}
    for few in (False, True):
        group = [
            s for own, choice in zip(scenes, choices, strict=True) for s in own if _few_do(workload, choice) == few
        ]
        num_layers = workload.facts.num_layers if few else 0
        estimates = estimate_ranks(group, num_layers=num_layers, at_once=workload.at_once, until_s=workload.until_s)
        results |= {id(scene): result for scene, result in zip(group, estimates, strict=True)}
    return [
        _memory_estimate(workload, choice, [results[id(scene)] for scene in own_scenes])
        for choice, own_scenes in zip(choices, scenes, strict=True)
    ]


def single_scene(workload: Workload, *, num_rows: int) -> RankScenario:
    """Returns the scene of the job on one device with `num_rows` rows: what its model computes and stores."""
    shape = GangShape(kind="cpu", num_devices=1, memory_bytes=0)
    config = {"micro_batch": num_rows, "recompute": "none"}
    job = replace(workload.job.synchronous, global_batch_size=num_rows)
    path = registry.BUILTIN["single"]
    return RankScenario(
        job=job, data=workload.data, technique=path, config=config, shape=shape, cache_dir=workload.cache_dir
    )


def data_parallel(axes: Mapping[str, int]) -> int:
    """Returns the number of slices into which ranks on these axes divide the global batch."""
    return math.prod(size for axis, size in axes.items() if axis.startswith("dp"))


def sharding(axes: Mapping[str, int]) -> int:
    """Returns the number of parts into which ranks on these axes divide the weights and the optimizer's state."""
    return axes.get("dp_shard", 1) * axes.get("dp_expert", 1) * axes.get("tp", 1) * axes.get("pp", 1)


def _memory_estimate(
    workload: Workload, choice: Choice, results: Sequence[RankEstimate | EstimateError]
) -> MemoryEstimate:
    technique, config, shape = choice
    host_bytes = technique.host_memory(workload.job, shape, config, workload.facts)
    estimated = [result for result in results if isinstance(result, RankEstimate)]
    if len(estimated) == len(results):
        device_bytes = max(max(r.peaks.values()) for r in estimated) + (CUBLAS_BYTES if shape.kind == "gpu" else 0)
        least = technique.estimate_memory(workload.job, shape, config, workload.facts) if host_bytes else 0
        saved = [_copied_bytes(workload, choice) if r.saved_bytes is None else r.saved_bytes for r in estimated]
        return MemoryEstimate(
            device_bytes=max(device_bytes, least), host_bytes=host_bytes + max(saved), source=FROM_META_STEP
        )
    message = next(result.message for result in results if isinstance(result, EstimateError))
    device_bytes, host_bytes = _by_arithmetic(workload, choice), host_bytes + _copied_bytes(workload, choice)
    return MemoryEstimate(device_bytes=device_bytes, host_bytes=host_bytes, source=ARITHMETIC, message=message)


def _copied_bytes(workload: Workload, choice: Choice) -> int:
    """Upper limit of the copy for a checkpoint: weights and optimizer state, divided as the layout divides them."""
    technique, config, shape = choice
    of_trained = WEIGHT_BYTES + OPTIMIZER_STATE_BYTES[workload.job.optimizer.name]
    state = workload.facts.num_updated * of_trained
    return state // sharding(technique.mesh_shape(shape, config))


def _by_arithmetic(workload: Workload, choice: Choice) -> int:
    """The state, and this device's share of the activations of one device alone, for each micro-batch in flight."""
    technique, config, shape = choice
    state = technique.estimate_memory(workload.job, shape, config, workload.facts)
    axes = technique.mesh_shape(shape, config)
    if (kept := kept_bytes_a_row(workload)) is None or "micro_batch" not in config:
        return state
    share = KEPT.get(config.get("recompute", "none"), 1.0) * data_parallel(axes) / technique.num_ranks(shape)
    return state + int(share * axes.get("pp", 1) * int(config["micro_batch"]) * kept)


def kept_bytes_a_row(workload: Workload) -> float | None:
    """Returns the bytes of activations that one device alone stores for a row, or None where the estimate failed."""
    alone = estimate_alone(workload)
    if isinstance(alone, EstimateError):
        return None
    return (max(alone.peaks.values()) - alone.peaks.get("step", 0)) / num_outlined_rows(workload)


def estimate_alone(workload: Workload) -> RankEstimate | EstimateError:
    """Estimates a few rows on one device: what the model itself computes and stores.

    A LoRA of a small rank counts as one of `USUAL_RANK`: what its products store is little beside what the model does,
    and jobs that differ in their ranks, as the trials of a sweep do, share an estimate, which takes a second.
    """
    facts, num_rows = workload.facts, num_outlined_rows(workload)
    scene = single_scene(workload, num_rows=num_rows)
    if (adapter := scene.job.adapter) is not None and adapter.from_pretrained is None:
        usual = replace(adapter, rank=max(adapter.rank, USUAL_RANK))
        scene = replace(scene, job=replace(scene.job, adapter=usual))
    num_layers = facts.num_layers if facts.decoder and not workload.job.freeze else 0
    return estimate_ranks([scene], num_layers=num_layers, at_once=workload.at_once)[0]


def num_outlined_rows(workload: Workload) -> int:
    """Returns the number of rows in `estimate_alone`: two if possible, as batch normalisation refuses one."""
    return min(2, workload.job.global_batch_size)


def _scenes(workload: Workload, choice: Choice) -> Iterable[RankScenario]:
    """Yields the scenes of the ranks that may need the most memory.

    They have as many micro-batches as are necessary to show what more would need.
    """
    technique, config, shape = choice
    axes, num_ranks = technique.mesh_shape(shape, config), technique.num_ranks(shape)
    job = workload.job
    if config.get("schedule") != "gpipe" and not job.is_exact:  # an exact job keeps more sums of more micro-batches
        num_slices = data_parallel(axes)
        fill = _to_fill(axes.get("pp", 1), schedule=config.get("schedule", "1f1b"))
        rows = min(job.global_batch_size // num_slices, fill * int(config["micro_batch"]))
        job = replace(job, global_batch_size=rows * num_slices)
    for rank in sorted({0, num_ranks - 1} if set(axes) & set(UNEQUAL_AXES) else {0}):
        yield RankScenario(
            job=job,
            data=workload.data,
            technique=workload.techniques[technique.name],
            config=config,
            shape=shape,
            cache_dir=workload.cache_dir,
            rank=rank,
        )


def _to_fill(num_stages: int, *, schedule: str) -> int:
    """The number of micro-batches after which more of them do not change the peak.

    Two show how gradients accumulate. Under `1f1b` the first stage stores as many as there are stages, and also what it
    sends and receives of the next ones.
    """
    if num_stages == 1:
        return 2
    return num_stages + 2 if schedule == "1f1b" else 2 * num_stages


def _few_do(workload: Workload, choice: Choice) -> bool:
    """Whether estimates with a few layers determine the memory of all layers."""
    technique, config, _ = choice
    divides = technique.divides_layers and config.get("pp", 2) > 1
    # Patterns of frozen parameters may name a layer.
    return workload.facts.decoder is not None and not divides and not workload.job.freeze


def copies_reference(job: Job) -> bool:
    """Returns whether the job's loss compares with its initial weights, of which it then keeps a frozen copy."""
    loss = loss_function(job.loss, job.loss_options)
    has_base = job.adapter is not None and job.adapter.begins_as_base
    return loss is not None and loss.compares and not loss.needs_teacher and not has_base


def adaptation_bytes(job: Job, *, num_rows: int, data: PreparedData) -> int:
    """Returns bytes on each device of a whole teacher and its logits for `num_rows`, or of a mask for each weight.

    Raises ValueError where the teacher is unknown, or has another vocabulary than the job.
    """
    adaptation = job.adaptation
    if adaptation is None or not job.trains or adaptation.kind not in (DISTILLED, PRUNED):
        return 0
    student = model_facts(job.model, data=data)
    if adaptation.kind == PRUNED:
        return student.num_parameters * MASK_BYTES
    teacher = model_facts(teacher_model(job, None), data=data)
    check_vocabulary(teacher, student, name=adaptation.teacher)
    if teacher.decoder is None or student.decoder is None:
        return teacher.parameter_bytes
    return teacher.parameter_bytes + num_rows * teacher.decoder.seq_len * teacher.decoder.vocab_size * FP32_BYTES


def check_vocabulary(teacher: ModelFacts, student: ModelFacts, *, name: str | None) -> None:
    """Raises ValueError where a teacher, whose name is `name`, has another vocabulary than its student."""
    if teacher.decoder is None or student.decoder is None or teacher.decoder.vocab_size == student.decoder.vocab_size:
        return
    raise ValueError(
        f"distillation: the teacher {name} has a vocabulary of {teacher.decoder.vocab_size} tokens, and the student "
        f"one of {student.decoder.vocab_size}. To fix: give both the same data.tokenizer and vocab_size"
    )
