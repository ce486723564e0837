"""The numbers of a global batch that a loss needs before its forwards, such as of tokens, summed over ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ringmaster.techniques.data import Dataset, Indices, fetch
from ringmaster.techniques.data.samples import PaddedDataset
from ringmaster.techniques.processes.ranks import RankContext
from ringmaster.techniques.technique import Technique, data_parallel_size
from ringmaster.techniques.training.bound_loss import BoundLoss, SampleTensors

Chunk = tuple[Sequence[int], bool, int | None]
"""The rows of a forward pass, whether they count, and the width of their global batch."""
Run = Callable[[dict[str, Any]], tuple[Any, SampleTensors]]
"""Returns the model's output for a batch, None on ranks without one, and the batch with what its loss compares."""


def batch_totals(
    loss: BoundLoss,
    dataset: Dataset,
    chunks: Iterable[Chunk],
    *,
    rows: Indices,
    width: int | None,
    technique: Technique,
    ranks: RankContext,
    run: Run,
) -> Mapping[str, float]:
    """Returns the totals of a loss that has some. All ranks call it together.

    chunks: of this rank, as many as of every other. rows: of the global batch. width: that of the longest row, None
    where rows are not padded. run: used for a first pass, if the loss has one; a row alone has none.
    """
    num_replicas = ranks.num_ranks // data_parallel_size(ranks.mesh)  # ranks with the same rows
    num_outputs = technique.loss_replicas(ranks.mesh)  # those of them that have an output
    before = {int(row): int(rows[place - 1]) for place, row in enumerate(rows)}
    own = dict.fromkeys(loss.total_names, 0.0)
    # Room for the prompt of one row with the completion of another.
    wide = min(2 * width, dataset.width) if width is not None and isinstance(dataset, PaddedDataset) else None
    for chunk, counted, _ in chunks:
        batch = fetch(dataset, chunk, width=wide)
        added = [(loss.totals(batch), num_replicas)]
        first = None
        if len(rows) > 1:
            first = loss.first_pass(batch, fetch(dataset, [before[row] for row in chunk], width=wide))
        if first is not None:
            output, completed = run(dict(first))
            added += [] if output is None else [(loss.first_totals(output, completed), num_outputs)]
        for values, num_alike in added:
            for name, value in values.items():
                own[name] += counted * value / num_alike
    return dict(zip(own, ranks.sum([*own.values()]), strict=True))
