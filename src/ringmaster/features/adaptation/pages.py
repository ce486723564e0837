"""The comparison of a model with its parents on its page."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ringmaster.tasks.recording.record_hooks import RecordHook
from ringmaster.tasks.storage.journal import JobRecord
from ringmaster.techniques import Job
from ringmaster.text import code_span, markdown, markdown_table


class ComparedModels(RecordHook):
    """Shows what was measured of a model and of its parents."""

    def paragraphs(self, job: Job, record: JobRecord) -> Iterator[str]:
        """Yields a table."""
        yield compared_with_parents(record.compared)


def compared_with_parents(compared: Sequence[Mapping[str, Any]]) -> str:
    """Returns a comparison of a model with its parents as markdown: bytes, seconds of a batch, and metrics.

    All are measured alike on one device.

    compared: the model first, then its parents: `model`, `weight_bytes`, `sparsity`, `batch_s` and `metrics` of each.
    """
    if len(compared) < 2:
        return ""
    own = compared[0]
    rows = [["", "this one", *(code_span(str(entry["model"])) for entry in compared[1:])]]
    rows.append(["weights", *(_bytes(entry, own) for entry in compared)])
    rows.append(["a batch", *(_seconds(entry, own) for entry in compared)])
    rows += [[markdown(key), *(_figure(entry["metrics"].get(key)) for entry in compared)] for key in own["metrics"]]
    if any(entry["sparsity"] > 0.01 for entry in compared):
        rows.append(["zeros", *(f"{entry['sparsity']:.0%}" for entry in compared)])
    return markdown_table(rows[0], rows[1:])


def _bytes(entry: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    text = f"{entry['weight_bytes'] / 1e6:.2f} MB"
    return text if entry is own else f"{text} ({_times(entry['weight_bytes'], own['weight_bytes'])} as large)"


def _seconds(entry: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    text = f"{entry['batch_s'] * 1000:.1f} ms"
    return text if entry is own else f"{text} ({_times(entry['batch_s'], own['batch_s'])} as long)"


def _times(value: float, of: float) -> str:
    return f"{value / of:.1f} times" if of else "?"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


RECORD_HOOKS = (ComparedModels(),)
