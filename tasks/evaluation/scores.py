"""What models say of single rows: asked of a worker process, and what can be made of it with numpy alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ringmaster.tasks.cluster import Device
from ringmaster.tasks.evaluation.resampling import Rows
from ringmaster.tasks.profiling.trials import Site, slots_of
from ringmaster.techniques import Job
from ringmaster.techniques.engine.scoring import Progress, ScoringOrder
from ringmaster.techniques.engine.scratch import ScratchFolder
from ringmaster.techniques.values import to_json

SCORER = "ringmaster.techniques.engine.scoring:main"
CAUSAL, CLASSIFIER, OTHER = "causal", "classifier", "other"

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores:
    """What one model says of some rows. kind: "causal", "classifier" or "other".

    loss_sums, loss_counts, hits, labelled: [rows], None where the rows have no labels.
    log_probabilities: [rows], of a causal model. predictions: [rows], probabilities: [rows, labels], of a classifier.
    num_tokens: [rows], of rows of tokens. columns: whole numbers of each row, by name, such as its label.
    slices: the name of each row's slice, by the slicer's name. inputs: the rows themselves, where they were kept.
    """

    kind: str
    num_rows: int
    loss_sums: Array | None = None
    loss_counts: Array | None = None
    hits: Array | None = None
    labelled: Array | None = None
    log_probabilities: Array | None = None
    predictions: Array | None = None
    probabilities: Array | None = None
    num_tokens: Array | None = None
    columns: Mapping[str, Array] = field(default_factory=dict)
    slices: Mapping[str, Array] = field(default_factory=dict)
    inputs: Mapping[str, Array] = field(default_factory=dict)

    def rows(self, metric: str) -> Rows:
        """What each row adds to a metric of `techniques.job.METRICS`. Raises ValueError where it cannot be known."""
        sums, counts = (self.hits, self.labelled) if metric == "accuracy" else (self.loss_sums, self.loss_counts)
        if sums is None or counts is None:
            raise ValueError(f"these rows have no {metric}: they have no labels for it")
        if metric == "perplexity":
            return Rows(sums, counts, lambda ratio: np.exp(np.minimum(ratio, 700.0)))
        return Rows(sums, counts, is_share=metric == "accuracy")

    def metrics(self, names: Sequence[str]) -> dict[str, float]:
        """Metrics over all rows."""
        return {name: self.rows(name).value for name in names}


@dataclass(frozen=True, kw_only=True)
class Cases:
    """Literal cases, a row each: texts, or columns of arrays such as pixel_values [rows, channels, height, width].

    labels: [rows], where they are known. encode: a dotted function that makes texts into columns of tensors.
    """

    texts: tuple[str, ...] | None = None
    columns: Mapping[str, Array] = field(default_factory=dict)
    labels: tuple[int, ...] | None = None
    encode: str | None = None


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Scores, and why there are none, by the model's name."""

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
    progress: Progress | None = None,
    site: Site,
    device: Device,
) -> Scored:
    """Scores models (folders by name) on the same rows, in one worker process on one device.

    Adapters of one base are asked in one batch over it (`techniques.engine.scoring.score_together`), others one after
    another. progress(num_done, num_rows): told now and then how many rows are scored, of all rows of all models.

    The rows are `cases`, or the held-out ones of `data` (the JSON form of prepared data; without it the job's data is
    prepared): those that an evaluation of `job` reads, or the first `max_rows`. The job also says the loss and the
    precision.
    """
    assert data is None or cases is None, "either data or cases"
    site.cache_dir.mkdir(parents=True, exist_ok=True)
    log = site.cache_dir / "scoring.log"
    scores: dict[str, Scores] = {}
    faults: dict[str, str] = {}
    with ScratchFolder(prefix="ringmaster-scores-") as scratch:
        order = ScoringOrder(
            job=job,
            models={name: str(path) for name, path in models.items()},
            slot=slots_of([device])[0],
            cache_dir=str(site.cache_dir),
            folder=str(scratch.path),
            data=data,
            cases=None if cases is None else _write_cases(cases, scratch.path),
            encode=None if cases is None else cases.encode,
            slicers=slicers or {},
            keep_inputs=keep_inputs,
            max_rows=max_rows,
            import_paths=site.import_paths,
        )
        status = 0
        with _channel(site, order, log) as channel:
            while (event := channel.receive())["event"] != "exit":
                if event["event"] == "scores":
                    scores[event["model"]] = _read(Path(event["file"]), event["kind"])
                elif event["event"] == "fault":
                    faults[event["model"]] = event["message"]
                elif event["event"] == "progress" and progress is not None:
                    progress(event["num_done"], event["num_rows"])
            status = event["status"]
    for name in models:
        if name not in scores and name not in faults:
            faults[name] = f"its process ended with status {status}; see {log}"
    return Scored(scores=scores, faults=faults)


@contextmanager
def _channel(site: Site, order: ScoringOrder, log: Path) -> Iterator[Any]:
    channel = site.server.spawn(target=SCORER, argument=to_json(order), log=log)
    try:
        yield channel
    finally:
        channel.close()


def _write_cases(cases: Cases, folder: Path) -> str:
    """The cases as a worker reads them."""
    if cases.texts is not None:
        said: dict[str, Any] = {"texts": list(cases.texts)}
        if cases.labels is not None:
            said["labels"] = list(cases.labels)
        file = folder / "cases.json"
        file.write_text(json.dumps(said), encoding="utf-8")
        return str(file)
    columns = dict(cases.columns)
    if cases.labels is not None:
        columns["labels"] = np.asarray(cases.labels)
    file = folder / "cases.npz"
    np.savez(file, **columns)  # type: ignore[arg-type]
    return str(file)


def _read(file: Path, kind: str) -> Scores:
    with np.load(file, allow_pickle=False) as found:
        arrays = {name: found[name] for name in found.files}
    grouped: dict[str, dict[str, Array]] = {"column": {}, "slice": {}, "input": {}}
    plain: dict[str, Any] = {}
    for name, array in arrays.items():
        group, dot, rest = name.partition(".")
        if dot:
            grouped[group][rest] = array
        else:
            plain[name] = array
    num_rows = max((len(array) for array in arrays.values()), default=0)
    if "predictions" in plain:
        plain["predictions"] = plain["predictions"].astype(np.int64)
    return Scores(
        kind=kind,
        num_rows=num_rows,
        columns=grouped["column"],
        slices=grouped["slice"],
        inputs=grouped["input"],
        **plain,
    )
