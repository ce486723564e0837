"""Logging of our long-lived processes to stderr, one line an entry; Prefect's own log goes to its server."""

from __future__ import annotations

import logging
import sys


def log_to_stderr() -> None:
    """Makes the loggers of `ringmaster` write to stderr only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger("ringmaster")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
