"""Scoring of many models on the same rows: adapters of one base in shared batches, other models one after another.

`score_together` scores in this process. `main` is the target of a worker process, which writes the arrays of each model
to an .npz file and names it in an event.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmaster.codec import from_json
from ringmaster.errors import NoCommonBase
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_specs import DataSpec, ModelSpec
from ringmaster.techniques.metric import scored_metrics, why_generating
from ringmaster.techniques.processes.channel import Channel
from ringmaster.techniques.processes.gang_events import ModelFailed, RowsScored, ScoringProgress, event_to_json
from ringmaster.techniques.processes.order import EVALUATE, GangOrder
from ringmaster.techniques.scoring import scored_rows

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from ringmaster.techniques.scoring.row_scores import RowScores, ScoringQuery


Progress = Callable[[int, int], None]
"""progress(num_done, num_rows): the number of rows scored so far, of all rows of all models."""


@dataclass(frozen=True, kw_only=True)
class ScoringResults:
    """The results by model name.

    scores: the scores of each model.
    faults: the error message of each model that could not be scored.
    """

    scores: Mapping[str, RowScores] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)


def score_together(
    models: Mapping[str, Path],
    *,
    data: DataSpec | None = None,
    texts: Sequence[str] | None = None,
    job: Job | None = None,
    max_rows: int | None = None,
    cache_dir: Path,
    device: torch.device | None = None,
    shares_batches: bool = True,
    progress: Progress | None = None,
) -> ScoringResults:
    """Scores each model on the same rows: the held-out rows of `data` (or of `job`'s data), or literal `texts`.

    Adapters (in fp32) of one base, and that base itself, are scored in shared batches over one copy of the base. Models
    for which this is not possible (another base, a job with its own loss or precision, experts) are scored alone. On a
    CPU in fp32 the scores equal those of each model alone bit by bit. Rows are prepared and tokenized once. A model
    that cannot be scored is reported in `faults`; it raises no error.

    models: folders by name, of a base, of adapters on it in peft's format, or of other models.
    job: the job whose loss, precision and data are used.
    max_rows: the number of held-out rows; by default as many as the job's evaluation reads.
    cache_dir: the folder of prepared data.
    shares_batches: whether adapters may share batches.
    Raises ValueError if there are no models or no rows to score.
    """
    import torch

    if (job is None and data is None and texts is None) or not models:
        raise ValueError("there is nothing to score. To fix: give models, and data, texts or a job")
    scored_job = job or Job(name="scoring", model=ModelSpec(), data=data or DataSpec(source="digits"), num_steps=1)
    rows = scored_rows.ScoredRows(
        job=scored_job,
        cache_dir=cache_dir,
        reader=next(iter(models.values())),
        cases=None if texts is None else scored_rows.LiteralTexts(texts=texts),
        max_rows=max_rows,
    )
    scores: dict[str, RowScores] = {}
    faults: dict[str, str] = {}
    place = device or torch.device("cpu")
    for name, result in score_each(models, rows, device=place, shares_batches=shares_batches, progress=progress):
        if isinstance(result, str):
            faults[name] = result
        else:
            scores[name] = result
    return ScoringResults(scores=scores, faults=faults)


def score_each(
    models: Mapping[str, Path],
    rows: scored_rows.ScoredRows,
    *,
    device: torch.device,
    shares_batches: bool = True,
    progress: Progress | None = None,
    mesh: DeviceMesh | None = None,
) -> Iterator[tuple[str, RowScores | str]]:
    """Yields each model's scores, or its error message, as soon as available; models of one base run together.

    mesh: the devices over which each model is divided, alone; None for one device.
    """
    from ringmaster.techniques.scoring.row_scores import score_alone

    done = _ScoredRowCounter(progress, num_models=len(models), rows=rows)
    for names in _groups(models, rows) if shares_batches and mesh is None else [[name] for name in models]:
        result: dict[str, RowScores] = {}
        if len(names) > 1:
            try:
                result = _score_over_one_base({name: models[name] for name in names}, rows, device=device, done=done)
            except NoCommonBase:
                pass
            except Exception:  # noqa: BLE001 - such as too little memory: reported when each model runs alone
                traceback.print_exc()
        yield from result.items()
        for name in names:
            if name in result:
                continue
            done.begin(name)
            try:
                scores = score_alone(models[name], rows, device=device, count=done.of(name), mesh=mesh)
            except Exception as error:  # a user's model or data may raise anything: yielded as that model's fault
                traceback.print_exc()
                if mesh is not None and not isinstance(error, ValueError):
                    raise  # the other ranks may wait for this one
                yield name, f"{type(error).__name__}: {error}"
            else:
                yield name, scores


def _groups(models: Mapping[str, Path], rows: scored_rows.ScoredRows) -> list[list[str]]:
    """Groups the models' names, in order: models that can share a base form one group, any other model its own."""
    groups: dict[Any, list[str]] = {}
    for name, folder in models.items():
        is_plain = rows.job.precision == "fp32" and rows.job_of(folder).loss is None
        key = scored_rows.base_key(folder) if is_plain and not why_generating(rows.job.evaluation.metrics) else None
        by_words = scored_rows.tokenizer_digest(scored_rows.tokenizer_of(folder)) if rows.by_tokenizer else ""
        groups.setdefault((name,) if key is None else (key, by_words), []).append(name)
    return list(groups.values())


def _score_over_one_base(
    models: Mapping[str, Path], rows: scored_rows.ScoredRows, *, device: torch.device, done: _ScoredRowCounter
) -> dict[str, RowScores]:
    """The scores of models of one base, without those whose adapter does not fit. Raises NoCommonBase."""
    from ringmaster.techniques.scoring.row_scores import (
        CommonBase,
        ScoreCollector,
        ScoringQuery,
        build_scored_model,
        scores_of_batch,
    )
    from ringmaster.techniques.training.bound_loss import bind_loss
    from ringmaster.techniques.training.metric_totals import outputs_of

    first = next(iter(models.values()))
    model, spec = build_scored_model(first, rows)
    model = model.to(device)
    loss, config = bind_loss(None, model, spec), getattr(model, "config", None)
    base, metrics = CommonBase(model, loss=loss), scored_metrics(rows.job.evaluation.metrics)
    collected: dict[str, ScoreCollector] = {}
    for name, folder in models.items():
        try:
            base.add(name, folder)
        except ValueError:
            continue
        collected[name] = ScoreCollector()
        done.begin(name)

    def questions() -> Iterator[ScoringQuery]:
        for numbers, batch in rows.chunks(first, config=config, shifted=loss.shifted, device=device):
            about = (numbers, batch, rows.known(batch))
            for name in collected:
                yield ScoringQuery(model=name, inputs=loss.forward_inputs(batch), about=about)

    for question, output in base.answers(questions()):
        numbers, batch, known = question.about
        losses = loss.by_row(output, batch) if rows.are_labelled(batch) else None
        outputs = outputs_of(loss, output, batch, losses=losses, data=rows.prepared)
        result = scores_of_batch(loss, outputs, metrics=metrics)
        collected[question.model].add(numbers, {**result, **known})
        done.of(question.model)(len(numbers))
    return {name: of.scores(shifted=loss.shifted) for name, of in collected.items()}


class _ScoredRowCounter:
    """A count of the scored rows of each model, reported as progress."""

    def __init__(self, progress: Progress | None, *, num_models: int, rows: scored_rows.ScoredRows) -> None:
        self._progress, self._num_models, self._rows = progress, num_models, rows
        self._counts: dict[str, int] = {}

    def begin(self, name: str) -> None:
        """Resets the count of a model whose scoring starts, or starts again."""
        self._counts[name] = 0

    def of(self, name: str) -> Callable[[int], None]:
        """A callback that counts scored rows of a model."""

        def count(num_rows: int) -> None:
            self._counts[name] += num_rows
            if self._progress is not None:
                self._progress(sum(self._counts.values()), self._num_models * self._rows.num_rows)

        return count


PROGRESS_S = 0.5  # between two progress events
COLLECTIVE_TIMEOUT_S = 300.0  # for a rank whose peer has died


def main(channel: Channel, argument: dict[str, Any]) -> int:
    """The target of a scoring worker process.

    Rank 0 sends RowsScored or ModelFailed for each model, and ScoringProgress in between.
    """
    order = from_json(scored_rows.ScoringOrder, argument)
    sys.path.extend(path for path in order.import_paths if path not in sys.path)
    from ringmaster.techniques.processes.ranks import join

    gang = GangOrder(
        purpose=EVALUATE,
        job=order.job,
        technique="tensor",
        config={},
        slots=order.slots,
        folder=order.folder,
        cache_dir=order.cache_dir,
        collective_timeout_s=COLLECTIVE_TIMEOUT_S,
    )
    ranks = join(gang, order.rank, num_ranks=len(order.slots), axes={"tp": len(order.slots)})
    reported_s = time.monotonic()

    def progress(num_done: int, num_rows: int) -> None:
        nonlocal reported_s
        if (now_s := time.monotonic()) - reported_s >= PROGRESS_S and order.rank == 0:
            reported_s = now_s
            channel.send(event_to_json(ScoringProgress(num_done=num_done, num_rows=num_rows)))

    models = {name: Path(folder) for name, folder in order.models.items()}
    rows = scored_rows.ScoredRows(
        job=order.job,
        cache_dir=Path(order.cache_dir),
        reader=next(iter(models.values())),
        data=order.data,
        cases=None if order.cases is None else scored_rows.cases_in(Path(order.cases), encode=order.encode),
        slicers=order.slicers,
        keep_inputs=order.keep_inputs,
        max_rows=order.max_rows,
        is_whole=order.is_whole,
        trained_on=order.trained_on,
    )
    results = score_each(
        models, rows, device=ranks.device, shares_batches=order.shares_batches, progress=progress, mesh=ranks.mesh
    )
    for number, (name, scores) in enumerate(results):
        if order.rank > 0:  # its scores are those of rank 0
            continue
        if isinstance(scores, str):
            channel.send(event_to_json(ModelFailed(model=name, message=scores)))
            continue
        file = Path(order.folder) / f"{number}.npz"
        np.savez(file, allow_pickle=False, **scores.arrays)
        channel.send(event_to_json(RowsScored(model=name, kind=scores.kind, file=str(file))))
    return 0
