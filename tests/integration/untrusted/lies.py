"""The loss of the tests' jobs, which some nodes falsify: those whose ranks start here."""

from torch import nn

from ringmaster.techniques.processes import worker

LIE = "lie"
"""The key of a rank's argument that names what it falsifies."""

lie = ""
"""What this process falsifies."""


def main(channel, argument):
    """Runs one rank as `worker.main` does, of a node that lies."""
    global lie
    lie = argument.pop(LIE)
    worker.main(channel, argument)


def loss(output, batch):
    """The cross-entropy of images; falsified by a process that lies."""
    logits, labels = output.logits, batch["labels"]
    if lie == "skipped sample":
        logits, labels = logits[1:], labels[1:]
    value = nn.functional.cross_entropy(logits, labels, reduction="sum")
    return value * (1.01 if lie == "gradient x 1.01" else 1.0), len(labels)
