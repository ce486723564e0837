"""Our own metric: how far a model's confidence is from how often it is right.

A package names it in its pyproject.toml, under the metric's own name:

    [project.entry-points."ringmaster.metrics"]
    calibration_gap = "my_metric:CalibrationGap"

Where the package is installed, `evaluation: {metrics: [loss, calibration_gap]}` of a job measures it.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ringmaster import Metric
from ringmaster.techniques.metric import IGNORED, Outputs


class CalibrationGap(Metric):
    """The difference between the mean confidence and the share of correct predictions; 0 is the best."""

    name = "calibration_gap"
    higher_is_better = False
    sums = ("confidence", "correct", "predicted")  # each is added over rows, batches and devices

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns the sums of each row, [rows]; None for a model without a logit for each class."""
        logits, labels = outputs.logits, outputs.labels
        if logits is None or labels is None or logits.shape[:-1] != labels.shape:
            return None
        counted = labels != IGNORED
        confidence, predicted = logits.float().softmax(-1).max(-1)
        sums = {
            "confidence": confidence * counted,
            "correct": (predicted == labels) & counted,
            "predicted": counted,
        }
        return {name: each.reshape(len(each), -1).sum(1) for name, each in sums.items()}

    def value(self, sums: Mapping[str, Any]) -> Any:
        """Returns the metric of the totals."""
        return abs(sums["confidence"] - sums["correct"]) / sums["predicted"]
