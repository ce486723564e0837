"""What a long-lived process of ours says goes to stderr, a line each; Prefect's own lines go to its server."""

from __future__ import annotations

import logging
import sys


def log_to_stderr() -> None:
    """Has our loggers write there, and nowhere else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger("ringmaster")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
