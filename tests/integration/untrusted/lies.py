"""The loss of the tests' jobs, which some nodes falsify: those whose processes have LIE in their environment."""

import os

from torch import nn

VARIABLE = "RINGMASTER_TEST_LIE"


def loss(output, batch):
    """The cross-entropy of images; falsified where the environment says how."""
    lie = os.environ.get(VARIABLE, "")
    logits, labels = output.logits, batch["labels"]
    if lie == "skipped sample":
        logits, labels = logits[1:], labels[1:]
    value = nn.functional.cross_entropy(logits, labels, reduction="sum")
    return value * (1.01 if lie == "gradient x 1.01" else 1.0), len(labels)
