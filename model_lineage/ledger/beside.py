"""A comparison of a fine-tune or an adapter with its base model, from recorded values only."""

from __future__ import annotations

from collections.abc import Mapping

from ringmaster.model_lineage.records import ModelRecord

KINDS = ("fine-tuned", "lora", "prefix-tuned", "ia3")
BESIDE = "\n\n**Beside its base**\n\n"  # heading of the section on a model's page


def beside_base(
    record: ModelRecord,
    base: ModelRecord,
    *,
    weight_bytes: tuple[int, int],
    metrics: Mapping[str, float],
    base_metrics: Mapping[str, float],
) -> str:
    """Returns a markdown table with the bytes of (the model's tensors, its base's) and the model's held-out metrics.

    base_metrics: shown only if both models were measured on the same rows, as they are not comparable otherwise.
    """
    own, theirs = weight_bytes
    name = base.registered_name if base.version is None else f"{base.registered_name}/{base.version}"
    times = f" ({theirs / own:.1f} times as large)" if own else ""
    rows = [["", "this one", f"`{name}`"], ["weights", megabytes(own), f"{megabytes(theirs)}{times}"]]
    known = base_metrics if held_out(record) == held_out(base) else {}
    rows += [[key, f"{value:.4g}", f"{known[key]:.4g}" if key in known else ""] for key, value in metrics.items()]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "| --- | --- | --- |", *lines[1:]])


def held_out(record: ModelRecord) -> frozenset[str]:
    """Returns the digests of the data that a model was evaluated on; of divided data, the digests of the whole."""
    of_evaluation = [data.digest for data in record.datasets if data.context == "evaluation"]
    return frozenset(of_evaluation or [data.digest for data in record.datasets])


def with_beside(description: str, table: str, *, limit: int) -> str:
    """Inserts the table as a section before the first one of `description`.

    Returns `description` unchanged if it has the section already, or would exceed `limit`.
    """
    if BESIDE in description or len(description) + len(BESIDE) + len(table) > limit:
        return description
    above, mark, below = description.partition("\n\n**")
    return above + BESIDE + table + mark + below


def megabytes(num_bytes: int) -> str:
    """Formats a number of bytes for display."""
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"
