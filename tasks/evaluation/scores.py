"""Per-row scores of models, computed by a worker process, and metrics derived from them with numpy alone."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ringmaster.codec import to_json
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.evaluation.resampling import MetricRows
from ringmaster.tasks.profiling.preflight import TrialEnvironment, slots_of
from ringmaster.techniques import Job
from ringmaster.techniques.metric import GatheredMetric, metric_named
from ringmaster.techniques.processes.events import ModelFailed, RankExited, RowsScored, ScoringProgress, event_from_json
from ringmaster.techniques.processes.forkserver_client import ScratchFolder
from ringmaster.techniques.scoring import Progress, ScoringOrder
from ringmaster.techniques.scoring.scored_rows import SCORES, TrainingData

SCORER = "ringmaster.techniques.scoring:main"
CAUSAL, CLASSIFIER, OTHER = "causal", "classifier", "other"

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores:
    """The outputs of one model for some rows.

    kind: "causal", "classifier" or "other".
    sums: [rows] or [rows, k], the sums of the default metrics and of those of the job's evaluation, by name; without
        those that cannot be computed, for example because the rows have no labels.
    log_probabilities: [rows], of a causal model.
    predictions: [rows], and probabilities: [rows, labels], of a classifier.
    num_tokens: [rows], of rows of tokens.
    columns: integers of each row, by name, such as its label.
    slices: the name of each row's slice, by the slicer's name.
    documents: the values of each metric that has rows of its own, by the metric's name.
    inputs: the rows themselves, if they were requested.
    """

    kind: str
    num_rows: int
    sums: Mapping[str, Array] = field(default_factory=dict)
    log_probabilities: Array | None = None
    predictions: Array | None = None
    probabilities: Array | None = None
    num_tokens: Array | None = None
    columns: Mapping[str, Array] = field(default_factory=dict)
    slices: Mapping[str, Array] = field(default_factory=dict)
    documents: Mapping[str, Array] = field(default_factory=dict)
    inputs: Mapping[str, Array] = field(default_factory=dict)

    def rows(self, metric: str) -> MetricRows:
        """Returns the contribution of each row to a metric.

        Raises ValueError if there is no such metric, or if the rows lack the labels for it.
        """
        measure = metric_named(metric)
        if metric in self.documents:
            return MetricRows(measure, {measure.sums[0]: self.documents[metric]})
        if not self.sums.keys() >= set(measure.sums):
            needed = f", which needs {measure.needs}" if measure.needs else ""
            raise ValueError(
                f"these rows have no {metric}{needed}. To fix: name a metric that suits the model and its rows"
            )
        sums: Mapping[str, Array] = {name: self.sums[name] for name in measure.sums}
        return MetricRows(measure, measure.relate(sums) if isinstance(measure, GatheredMetric) else sums)


@dataclass(frozen=True, kw_only=True)
class Cases:
    """Literal cases, one per row: texts, or columns of arrays such as pixel_values [rows, channels, height, width].

    encode: the dotted name of a function that converts texts to columns of tensors.
    """

    texts: tuple[str, ...] | None = None
    columns: Mapping[str, Array] = field(default_factory=dict)
    encode: str | None = None


@dataclass(frozen=True, kw_only=True)
class ScoringResult:
    """Scores, and the faults of models without scores, by the model's name."""

    scores: Mapping[str, Scores] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)


def score_models(
    models: Mapping[str, Path],
    *,
    job: Job,
    data: Mapping[str, Any] | None = None,
    cases: Cases | None = None,
    slicers: Mapping[str, str] | None = None,
    keep_inputs: bool = False,
    max_rows: int | None = None,
    is_whole: bool = False,
    trained_on: TrainingData | None = None,
    progress: Progress | None = None,
    environment: TrialEnvironment,
    device: Device,
    more_devices: Sequence[Device] = (),
) -> ScoringResult:
    """Scores models (folders by name) on the same rows, in one worker process for each device.

    Adapters of one base are scored in one batch over it (`techniques.scoring.score_together`), others
    sequentially.

    job: also determines the loss, the precision and the metrics beside the default ones.
    data: the JSON form of prepared data, of which the held-out rows are scored: those that an evaluation of `job`
        reads, or the first `max_rows`. None stands for the job's data, which is then prepared.
    is_whole: whether all rows of the data are scored, as those of data that nothing is trained on.
    trained_on: data whose training rows are left out.
    cases: literal cases to score instead of held-out rows.
    slicers: dotted names of functions from a row to its slice, by the slicer's name.
    progress: called from time to time as progress(num_done, num_rows), summed over all rows of all models.
    more_devices: devices over which each model is divided together with `device`, by tensor parallelism.
    """
    assert data is None or cases is None, "either data or cases"
    environment.cache_dir.mkdir(parents=True, exist_ok=True)
    log = environment.cache_dir / "scoring.log"
    scores: dict[str, Scores] = {}
    faults: dict[str, str] = {}
    with ScratchFolder(prefix="ringmaster-scores-") as scratch:
        order = ScoringOrder(
            job=job,
            models={name: str(path) for name, path in models.items()},
            slots=slots_of([device, *more_devices]),
            cache_dir=str(environment.cache_dir),
            folder=str(scratch.path),
            data=data,
            cases=None if cases is None else _write_cases(cases, scratch.path),
            encode=None if cases is None else cases.encode,
            slicers=slicers or {},
            keep_inputs=keep_inputs,
            max_rows=max_rows,
            is_whole=is_whole,
            trained_on=trained_on,
            import_paths=environment.import_paths,
        )
        with ExitStack() as stack:
            channel, *_ = [
                stack.enter_context(
                    closing(
                        environment.server.spawn(target=SCORER, argument=to_json(replace(order, rank=rank)), log=log)
                    )
                )
                for rank in range(len(order.slots))
            ]
            while not isinstance(event := event_from_json(channel.receive()), RankExited):
                match event:
                    case RowsScored():
                        scores[event.model] = _read(Path(event.file), event.kind)
                    case ModelFailed():
                        faults[event.model] = event.message
                    case ScoringProgress() if progress is not None:
                        progress(event.num_done, event.num_rows)
            status = event.status
    for name in models:
        if name not in scores and name not in faults:
            faults[name] = f"its process ended with status {status}; see {log}"
    return ScoringResult(scores=scores, faults=faults)


def _write_cases(cases: Cases, folder: Path) -> str:
    """Writes the cases to a file for the worker and returns its path."""
    if cases.texts is not None:
        file = folder / "cases.json"
        file.write_text(json.dumps({"texts": list(cases.texts)}), encoding="utf-8")
    else:
        file = folder / "cases.npz"
        np.savez(file, **cases.columns)  # type: ignore[arg-type]
    return str(file)


def _read(file: Path, kind: str) -> Scores:
    with np.load(file, allow_pickle=False) as result:
        arrays = {name: result[name] for name in result.files}
    grouped: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for name, array in arrays.items():
        group, dot, rest = name.partition(".")
        grouped[group if dot else ""][rest or name] = array
    plain = grouped[""]
    sums = {name: plain.pop(name) for name in list(plain) if name not in SCORES}
    num_rows = max((len(array) for name, array in arrays.items() if not name.startswith("document.")), default=0)
    if "predictions" in plain:
        plain["predictions"] = plain["predictions"].astype(np.int64)
    return Scores(
        kind=kind,
        sums=sums,
        num_rows=num_rows,
        columns=grouped["column"],
        slices=grouped["slice"],
        inputs=grouped["input"],
        documents=grouped["document"],
        **plain,
    )
