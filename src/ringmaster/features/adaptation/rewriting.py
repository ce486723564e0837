"""Jobs without steps: the parents' weights are read, rewritten (merged, pruned, quantized), exported, and measured.

Models are measured on the held-out data of a job by the loop that evaluates a job at its end.
"""

import resource
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ringmaster.codec import from_json, to_json
from ringmaster.features.adaptation.pruning import prune
from ringmaster.features.adaptation.structured_pruning import narrow
from ringmaster.techniques import registry
from ringmaster.techniques.checkpoints.tensor_files import DTYPES
from ringmaster.techniques.data import PreparedData, prepare
from ringmaster.techniques.data.inference import with_loss_of
from ringmaster.techniques.job import EXTRACTED, MERGED, PRUNED, QUANTIZED, STRUCTURED, AdaptationSpec, Job
from ringmaster.techniques.job_specs import CONTINUE, Adapter, ModelSpec
from ringmaster.techniques.models.architectures import instantiate
from ringmaster.techniques.models.build import build_model, model_config
from ringmaster.techniques.models.export import export_model, export_quantized
from ringmaster.techniques.models.facts import model_facts
from ringmaster.techniques.models.model_folders import model_of_folder, quantization_of, weight_bytes
from ringmaster.techniques.models.peft_format import base_changes_of, base_of, is_adapter, resolved
from ringmaster.techniques.models.quantization import quantize
from ringmaster.techniques.processes.gang_events import JobReady, JobResult, OutcomeStatus, TrialMeasured
from ringmaster.techniques.processes.order import EVALUATE, GangOrder, Slot
from ringmaster.techniques.processes.ranks import RankContext, join
from ringmaster.techniques.processes.reporter import WAITING_TIMEOUT_S, Reporter, wait_for_stop
from ringmaster.techniques.technique import Config, GangShape, Technique
from ringmaster.techniques.training.rank_job import prepared_data
from ringmaster.techniques.training.trainer import Trainer

TECHNIQUE = "single"


@dataclass(frozen=True, kw_only=True)
class EvaluationOrder:
    """Measure the metrics of `job` with the weights in `model_dir`, on one device.

    model_dir: a folder that a job exported or `save_pretrained` wrote.
    data: the JSON form of the `PreparedData` whose held-out samples are read. Exactly those samples are read, even if
        the source files have changed since.
    slot: the device.
    cache_dir: the folder of prepared data.
    """

    job: Job
    model_dir: str
    data: Mapping[str, Any]
    slot: Slot
    cache_dir: str


def evaluator(order: EvaluationOrder, *, ranks: RankContext, beat: Callable[[], None]) -> Trainer:
    """Returns a trainer whose `evaluate` computes a model's metrics as a job's evaluation at its end does.

    ranks: a single process.

    Raises ValueError if the weights do not fit the job's model, or were trained with another tokenizer.
    """
    order = of_folder(order)
    prepared = from_json(PreparedData, order.data)
    technique = registry.load(registry.dotted_path(TECHNIQUE))
    gang = GangOrder(
        purpose=EVALUATE,
        job=order.job,
        technique=registry.dotted_path(TECHNIQUE),
        config=config_of(technique, order, prepared),
        slots=(order.slot,),
        folder="",
        cache_dir=order.cache_dir,
        data=to_json(prepared),
        weights_from=order.model_dir or None,
    )
    return Trainer(gang, technique, ranks, beat=beat)


def of_folder(order: EvaluationOrder) -> EvaluationOrder:
    """The order with the folder's contents resolved.

    If `model_dir` holds an adapter, the adapter becomes the job's, and `model_dir` becomes its base's folder (empty if
    the base has none). Else the job's adapter is removed.
    """
    folder = Path(order.model_dir).absolute()
    if not is_adapter(folder):
        return replace(order, job=replace(order.job.on_base(), adapter=None), model_dir=str(folder))
    base, adapter, trained = base_of(folder), resolved(Adapter(from_pretrained=str(folder))), order.job.adapter
    if trained is not None and (trained.continues_base or trained.from_pretrained is not None):
        adapter = replace(adapter, base_adapter=CONTINUE)  # so what it began with is another adapter, not the base
    job = replace(order.job, adapter=adapter).on_base(base_changes_of(folder))
    return replace(order, job=job, model_dir=str(base or ""))


def config_of(technique: Technique, order: EvaluationOrder, prepared: PreparedData) -> Config:
    """The first config whose training would fit the device's memory, as an evaluation needs less; else the smallest."""
    job = order.job
    facts = model_facts(job.model, data=prepared, adapter=job.adapter, base_changes=job.base_changes)
    shape = GangShape(kind=order.slot.kind, num_devices=1, memory_bytes=order.slot.memory_bytes)
    configs = list(technique.configs(job, shape, facts))
    needs = [technique.estimate_memory(job, shape, config, facts) for config in configs]
    fitting = [config for config, least_bytes in zip(configs, needs, strict=True) if least_bytes <= shape.memory_bytes]
    return fitting[0] if fitting else configs[needs.index(min(needs))]


READING_TIMEOUT_S = 600.0
MIN_STEP_S = 1e-6  # reported as the time of a step, as there are no steps
COMPARING_TIMEOUT_S = 600.0
TIMED_BATCHES = 8  # the fastest one counts, as other load on the machine can only add time


def run(order: GangOrder, reporter: Reporter) -> JobResult:
    """Rewrites and exports the model, then measures it and its parents.

    Returns what `segment_loop.train_segment` returns, with `compared`.
    """
    assert order.model_dir is not None
    folder = Path(order.model_dir)
    reporter.phase("reading the parents", timeout_s=READING_TIMEOUT_S)
    ranks = join(order, 0, num_ranks=1, axes={})
    startup_s = time.monotonic() - order.ordered_at_s
    reporter.send(JobReady(step=0, startup_s=startup_s))
    _rewrite(order, folder, beat=reporter.beat, is_trial=False)
    started_s = time.perf_counter()
    compared = compare(order, ranks, reporter, folder=folder)
    return JobResult(
        status=OutcomeStatus.DONE,
        first_step=0,
        step=0,
        startup_s=startup_s,
        metrics=dict(compared[0].metrics),
        compared=tuple(map(to_json, compared)),
        evaluate_s=time.perf_counter() - started_s,
    )


def profile(order: GangOrder, reporter: Reporter) -> JobResult:
    """Runs the whole job once with fresh weights, as the parents may not be trained yet; that takes as long."""
    reporter.phase("trying", timeout_s=READING_TIMEOUT_S)
    ranks = join(order, 0, num_ranks=1, axes={})
    scratch = Path(order.folder) / "scratch"
    reporter.send(JobReady())
    began_s = time.monotonic()
    _rewrite(order, scratch / "model", beat=reporter.beat, is_trial=True)
    rewritten_s = time.monotonic()
    compare(order, ranks, reporter, folder=scratch / "model")
    num_models = 1 + len(order.job.parents)  # the parents may not exist yet: the time of the model is used for theirs
    measured = {
        "step_s": MIN_STEP_S,
        "startup_s": max(began_s - order.ordered_at_s, 0.0),
        "peak_bytes": _peak(ranks.device),
        "export_s": rewritten_s - began_s,
        "evaluate_s": (time.monotonic() - rewritten_s) * num_models,
    }
    shutil.rmtree(scratch)
    reporter.phase("waiting for its neighbours", timeout_s=WAITING_TIMEOUT_S)
    reporter.send(TrialMeasured(profile=measured))
    wait_for_stop(reporter)
    return JobResult(status=OutcomeStatus.DONE)


def _rewrite(order: GangOrder, folder: Path, *, beat: Callable[[], None], is_trial: bool) -> None:
    """Writes the job's model to `folder`.

    In a trial (`is_trial`), a fresh model replaces each parent whose folder the order lacks.
    """
    job, adaptation = order.job, order.job.adaptation
    assert adaptation is not None and not job.trains
    prepared = prepared_data(order)

    def read(folder: str | None, *, is_named: bool) -> nn.Module:
        assert folder is not None or is_trial or not is_named, "a parent's folder was not ordered"
        if folder is not None and quantization_of(Path(folder)) is not None:
            raise ValueError(
                f"the model in {folder} is quantized, and a quantized model is not rewritten further. "
                f"To fix: take what it was quantized from, and quantize the result"
            )
        of_folder = model_of_folder(Path(folder)) if folder and adaptation.method == STRUCTURED else None
        spec, weights_from = of_folder or job.model, Path(folder) if folder else None
        model = build_model(spec, data=prepared, seed=job.seed, weights_from=weights_from)
        beat()
        return model

    if adaptation.kind == EXTRACTED and order.weights_from is not None:
        model = _part(order.weights_from, adaptation, prepared)
    elif adaptation.kind == MERGED:
        parents = (read(order.parents.get(parent), is_named=True) for parent in adaptation.parents)
        base = None if job.base is None else read(order.weights_from, is_named=True)
        model = merge(base, parents, adaptation, beat=beat)
    else:
        # Without a base, the model that `model.from_pretrained` names is rewritten.
        model = read(order.weights_from, is_named=job.base is not None)
    of = job.model.from_pretrained if adaptation.kind == EXTRACTED else order.weights_from or job.model.from_pretrained
    job = with_loss_of(job, *(Path(each) for each in (of, *order.parents.values()) if each is not None))
    if adaptation.kind == QUANTIZED:
        how = quantize(model, adaptation)
        export_quantized(folder, spec=job.model, model=model, quantization=how, prepared=prepared, base=of, job=job)
        return
    if adaptation.method == STRUCTURED:
        whole, model = model, instantiate(model_config(job.model, prepared))
        narrow(whole, model)
    elif adaptation.kind == PRUNED:
        prune(model, adaptation)
    export_model(folder, spec=job.model, model=model, state=model.state_dict(), prepared=prepared, base=of, job=job)


def _part(folder: str, adaptation: AdaptationSpec, prepared: PreparedData) -> nn.Module:
    """The model of one job in the folder of a composite."""
    from ringmaster.techniques.models.composite_model import CompositeModel

    spec, how = model_of_folder(Path(folder)), adaptation.composition
    assert spec is not None and how is not None and how.index is not None, "a part of a composite"
    whole = build_model(spec, data=prepared, seed=0, weights_from=Path(folder))
    assert isinstance(whole, CompositeModel)
    return whole.part(how.index)


def _peak(device: torch.device) -> int:
    """Returns the peak of allocated bytes of a GPU, or of this process's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True, kw_only=True)
class ModelMeasurements:
    """Measurements of one model on the held-out data of a job, by one process on one device.

    model: the job's name, or a parent's name as the job spells it.
    weight_bytes: size of its safetensors files.
    sparsity: the share of zeros among its floating-point matrices.
    batch_s: the shortest time to evaluate one global batch, in seconds.
    """

    model: str
    weight_bytes: int
    sparsity: float
    batch_s: float
    metrics: Mapping[str, float]


def compare(order: GangOrder, ranks: RankContext, reporter: Reporter, *, folder: Path) -> tuple[ModelMeasurements, ...]:
    """Measures the model that was exported to `folder`, then those parents whose folders the order contains.

    Only rank 0 measures, on its device, one model after another.
    """
    job, parents = order.job, order.parents
    models: list[tuple[str, Path, ModelSpec | None]] = [(job.name, folder, job.model)]
    if job.adaptation is None or job.adaptation.kind != EXTRACTED:  # a composite computes the losses of all its jobs
        models += [(name, Path(parents[name]), None) for name in job.parents if name in parents]
    alone = replace(ranks, rank=0, num_ranks=1, mesh=None)
    result = []
    for name, place, model in models:
        reporter.phase(f"measuring {name}", timeout_s=COMPARING_TIMEOUT_S)
        result.append(
            _measure(order, alone, reporter, name=name, folder=place, model=model or _model(job, name, place))
        )
    return tuple(result)


def _model(job: Job, name: str, folder: Path) -> ModelSpec:
    """Returns a parent's model: its own of a teacher or a larger base; of parents of the same shape, the job's."""
    adaptation = job.adaptation
    if adaptation is not None and (name == adaptation.teacher or adaptation.method == STRUCTURED):
        model = adaptation.teacher_model or model_of_folder(folder)
        assert model is not None, "a teacher was trained with, or a base was narrowed"
        return model
    return job.model


def _measure(
    order: GangOrder, ranks: RankContext, reporter: Reporter, *, name: str, folder: Path, model: ModelSpec
) -> ModelMeasurements:
    data = order.data or to_json(prepare(order.data_spec, cache_dir=Path(order.cache_dir)))
    evaluation = EvaluationOrder(
        job=replace(order.job.without(AdaptationSpec).on_base(), model=model, base=None, adapter=None),
        model_dir=str(folder),
        data=data,
        slot=order.slots[0],
        cache_dir=order.cache_dir,
    )
    trainer = evaluator(evaluation, ranks=ranks, beat=reporter.beat)
    metrics = trainer.evaluate()
    return ModelMeasurements(
        model=name,
        weight_bytes=weight_bytes(folder),
        sparsity=share_of_zeros(folder),
        batch_s=min(_batch_s(trainer) for _ in range(TIMED_BATCHES)),
        metrics=metrics,
    )


def _batch_s(trainer: Trainer) -> float:
    started_s = time.perf_counter()
    trainer.evaluate(max_batches=1)
    return time.perf_counter() - started_s


def share_of_zeros(folder: Path) -> float:
    """Returns the share of zeros among the floating-point tensors of two or more dimensions."""
    num_zeros = num_weights = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a file is not a mapping
                part = file.get_slice(name)
                if len(part.get_shape()) > 1 and DTYPES[part.get_dtype()].is_floating_point:
                    tensor = file.get_tensor(name)
                    num_weights += tensor.numel()
                    num_zeros += tensor.numel() - int(tensor.count_nonzero())
    return num_zeros / num_weights if num_weights else 0.0


@torch.no_grad()
def merge(
    base: nn.Module | None, parents: Iterable[nn.Module], adaptation: AdaptationSpec, *, beat: Callable[[], None]
) -> nn.Module:
    """Returns one model merged from the parents, which are read one after another.

    Memory holds two models at a time, and sums in double precision. `base` is the base of task arithmetic. Tensors that
    are not floating-point (counters) are those of the base, or of the first parent.

    With the parents' weights theta_i and their given factors w_i:

        average            theta = sum_i w_i theta_i / sum_i w_i      (Wortsman et al., Model soups, arXiv:2203.05482)
        task arithmetic    theta = theta_0 + sum_i w_i (theta_i - theta_0)           (Ilharco et al., arXiv:2212.04089)
    """
    weights = adaptation.weights or (1.0,) * len(adaptation.parents)
    is_average = base is None
    scale = 1.0 / sum(weights) if is_average else 1.0
    start = 0.0 if is_average else 1.0 - sum(weights)  # theta_0 (1 - sum w) + sum w theta_i
    result = base
    totals: dict[str, Tensor] = {} if base is None else {k: start * v.double() for k, v in _tensors(base).items()}
    for weight, parent in zip(weights, parents, strict=True):
        result = parent if result is None else result
        for name, tensor in _tensors(parent).items():
            part = tensor.double() * (weight * scale)
            totals[name] = totals[name] + part if name in totals else part
        beat()
    assert result is not None, "nothing to merge"
    for name, tensor in _tensors(result).items():
        tensor.copy_(totals[name])
    return result


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns floating-point parameters and saved buffers, by name; shared tensors occur once."""
    named: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            named.setdefault(id(tensor), (name, tensor))
    return dict(named.values())
