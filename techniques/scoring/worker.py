"""Scoring in a separate worker process. Each model's arrays are written to an .npz file; events name the file."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ringmaster.codec import from_json
from ringmaster.techniques.runtime.processes.channel import Channel
from ringmaster.techniques.runtime.processes.events import (
    ModelFailed,
    RowsScored,
    ScoringProgress,
    event_to_json,
)
from ringmaster.techniques.scoring.order import ScoringOrder
from ringmaster.techniques.scoring.rows import Rows, cases_in
from ringmaster.techniques.scoring.together import score_each

PROGRESS_S = 0.5  # between two progress events


def main(channel: Channel, argument: dict[str, Any]) -> int:
    """The target of a scoring worker process.

    Sends RowsScored or ModelFailed for each model, and ScoringProgress in between.
    """
    order = from_json(ScoringOrder, argument)
    sys.path.extend(path for path in order.import_paths if path not in sys.path)
    from ringmaster.techniques.runtime.processes.ranks import take_device

    device = take_device((order.slot,), 0, num_ranks=1)
    said_s = time.monotonic()

    def progress(num_done: int, num_rows: int) -> None:
        nonlocal said_s
        if (now_s := time.monotonic()) - said_s >= PROGRESS_S:
            said_s = now_s
            channel.send(event_to_json(ScoringProgress(num_done=num_done, num_rows=num_rows)))

    models = {name: Path(folder) for name, folder in order.models.items()}
    found = score_each(models, rows_of(order), device=device, together=order.together, progress=progress)
    for number, (name, scores) in enumerate(found):
        if isinstance(scores, str):
            channel.send(event_to_json(ModelFailed(model=name, message=scores)))
            continue
        file = Path(order.folder) / f"{number}.npz"
        np.savez(file, allow_pickle=False, **scores.arrays)
        channel.send(event_to_json(RowsScored(model=name, kind=scores.kind, file=str(file))))
    return 0


def rows_of(order: ScoringOrder) -> Rows:
    """The rows that an order selects."""
    return Rows(
        job=order.job,
        cache_dir=Path(order.cache_dir),
        reader=Path(next(iter(order.models.values()))),
        data=order.data,
        cases=None if order.cases is None else cases_in(Path(order.cases), encode=order.encode),
        slicers=order.slicers,
        keep_inputs=order.keep_inputs,
        max_rows=order.max_rows,
        is_whole=order.is_whole,
        trained_on=order.trained_on,
    )
