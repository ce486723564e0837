"""How often to checkpoint."""

from __future__ import annotations

import math

MOST_OVERHEAD = 0.02  # share of the time that saving may cost
MEAN_TIME_BETWEEN_FAILURES_S = 24 * 3600.0  # of one device


def checkpoint_interval_s(stall_s: float, *, num_devices: int, mtbf_s: float = MEAN_TIME_BETWEEN_FAILURES_S) -> float:
    """Seconds of training between checkpoints that lose least, from what one takes of training and the failure rate.

    With C = `stall_s` (the seconds for which a checkpoint that is written while training goes on holds it up) and
    M = `mtbf_s` / `num_devices` (any device's failure ends the gang), the first-order optimum is sqrt(2 C M) (Young,
    CACM 1974; Daly, FGCS 2006); never so short that saving costs more than 2 % of the time.
    """
    optimum_s = math.sqrt(2 * stall_s * mtbf_s / num_devices)
    return max(optimum_s, stall_s / MOST_OVERHEAD)
