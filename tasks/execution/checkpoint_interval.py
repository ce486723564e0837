"""The interval between checkpoints, by Young and Daly."""

from __future__ import annotations

import math

MOST_OVERHEAD = 0.02  # the largest share of the time that saving may take
MEAN_TIME_BETWEEN_FAILURES_S = 24 * 3600.0  # a device's


def checkpoint_interval_s(stall_s: float, *, num_devices: int, mtbf_s: float = MEAN_TIME_BETWEEN_FAILURES_S) -> float:
    """Returns the seconds of training between checkpoints that minimize the expected loss of time.

    C = `stall_s` is the time for which writing a checkpoint in the background holds up training. M = `mtbf_s` /
    `num_devices` is the gang's mean time between failures, as the failure of any device ends the gang. The first-order
    optimum is sqrt(2 C M) (Young, CACM 1974; Daly, FGCS 2006). The interval is never so short that saving takes more
    than 2 % of the time.
    """
    optimum_s = math.sqrt(2 * stall_s * mtbf_s / num_devices)
    return max(optimum_s, stall_s / MOST_OVERHEAD)
