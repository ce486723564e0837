"""Figures of parts of the held-out rows in MLflow, under keys of their own: they are no model's metrics."""

from collections.abc import Mapping

from ringmaster.features.rung_evaluation.row_parts import interval_of
from ringmaster.tasks.recording.record_hooks import RecordHook
from ringmaster.techniques.processes.gang_events import EvaluationReported


class PartReport(RecordHook):
    """Records the first part of each evaluation, with its interval."""

    def partial_metrics(self, report: EvaluationReported) -> Mapping[str, float]:
        """Returns the metrics of a part; none of further rows, which are no figure by themselves."""
        if (part := report.part) is None or part.begin > 0:
            return {}
        lower, upper = interval_of(part)
        values = {**report.metrics, "lower": lower, "upper": upper, "rows": report.num_rows or 0}
        return {f"eval-part/{key}": value for key, value in values.items()}


RECORD_HOOKS = (PartReport(),)
