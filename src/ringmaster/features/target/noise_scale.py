"""The gradient noise scale: how many steps a larger batch saves, measured while training. Imports no torch by itself.

With G = |E g|^2 the squared length of the expected gradient and S the sum of the variances of a sample's gradient, the
gradient of b samples has E |g_b|^2 = G + S / b. The noise scale S / G is the batch size at which the noise is as large
as the signal. Far below it, twice the batch halves the steps to a given loss; far above it, it saves none.

Gradients are measured as the optimizer uses them: AdamW's are multiplied by P = 1 / (sqrt(v) + .1 rms(sqrt(v))), with v
of the step before (`PreconditionedNorm`). Without the damping, parameters that are hardly trained rule the sums.

Sources: McCandlish et al., An Empirical Model of Large-Batch Training (arXiv:1812.06162); Qiao et al., Pollux (OSDI
2021); Johnson et al., AdaScale SGD (ICML 2020).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ringmaster.techniques.job_specs import LEARNING_RATE_RULES

PROBE_SHARE, MIN_PROBE_STEPS = 0.1, 20
"""Of a job's steps, in which the noise scale is measured in each step before a batch size is chosen."""
MEASURED_EVERY = 8
"""Steps between two measurements after the probe."""
NUM_BLOCKS = 20
MIN_SIGNAL = 1e-3
"""The least share of a gradient's squared length that counts as signal."""
DAMPING = 0.1
DAMPED_GAIN, SQUARE_ROOT = LEARNING_RATE_RULES
LATER_NOISE = (0.25, 16.0)
"""The factors within which the noise scale of the rest of a run is expected to be, relative to that of its probe: it is
known within a factor of two, and mostly rises while the loss falls."""
FORMULA_ERROR = 0.39
"""The standard deviation of the logarithm of (steps taken / steps predicted). In the first measurements, of 12 runs for
each of three tasks, the error of a prediction was 14 to 30 % in the median, and 46 to 136 % at worst: the median of a
normal distribution with this deviation is 30 %, and the largest of 12 values 111 %."""
TWO_SIDED_90 = 1.645
"""The deviations on each side of the mean of a normal distribution within which 90 % of it lie."""


def probe_steps(num_steps: int) -> int:
    """Returns the steps of a job's probe."""
    return min(max(math.ceil(PROBE_SHARE * num_steps), MIN_PROBE_STEPS), num_steps)


@dataclass(frozen=True, kw_only=True)
class GradientNoise:
    """The estimates of a step, of S by `noise` and of G by `signal`. Each may be negative; only sums of many count."""

    step: int
    signal: float
    noise: float
    num_samples: int

    @classmethod
    def of(cls, step: int, *, part: float, whole: float, part_size: int, size: int) -> GradientNoise:
        """Returns the estimates from squared lengths of the mean gradient of a step, and of that of a part of it.

        With b samples in the part and B in the whole: G = (B |g_B|^2 - b |g_b|^2) / (B - b) and
        S = (|g_b|^2 - |g_B|^2) / (1/b - 1/B). Both are without bias.
        """
        return cls(
            step=step,
            signal=(size * whole - part_size * part) / (size - part_size),
            noise=(part - whole) / (1 / part_size - 1 / size),
            num_samples=size,
        )


@dataclass(frozen=True, kw_only=True)
class NoiseBlock:
    """The sums of G and S over consecutive steps, G at least `MIN_SIGNAL` of the gradient's squared length."""

    signal: float
    noise: float

    @property
    def scale(self) -> float:
        """The noise scale S / G, in samples."""
        return self.noise / self.signal if self.signal > 0 else math.inf


def noise_blocks(measured: Sequence[GradientNoise], *, most: int = NUM_BLOCKS) -> list[NoiseBlock]:
    """Returns the sums of measurements of a run in consecutive blocks of equally many steps."""
    num = min(most, len(measured))
    bounds = [round(k * len(measured) / num) for k in range(num + 1)] if num else []
    return [_sum(measured[first:end]) for first, end in pairwise(bounds)]


def _sum(measured: Iterable[GradientNoise]) -> NoiseBlock:
    measured = list(measured)
    signal, noise = sum(each.signal for each in measured), max(sum(each.noise for each in measured), 0.0)
    squared = sum(each.signal + each.noise / each.num_samples for each in measured)
    return NoiseBlock(signal=max(signal, MIN_SIGNAL * squared), noise=noise)


def steps_ratio(blocks: Sequence[NoiseBlock], *, size: int, new_size: int, factor: float = 1.0) -> float:
    """Returns steps(B) / steps(B0), the steps to a loss with batches of B = `new_size` and of B0 = `size` samples.

    The mean over blocks, with the noise scale N of each, of (1 + N / B) / (1 + N / B0). Each term lies between B0 / B
    and 1, so that no outlier rules the mean, as it does the ratio of the sums.

    factor: of all noise scales.
    """
    return statistics.fmean(_block_ratios(blocks, size=size, new_size=new_size, factor=factor))


def _block_ratios(blocks: Sequence[NoiseBlock], *, size: int, new_size: int, factor: float) -> list[float]:
    def ratio(scale: float) -> float:
        return size / new_size if math.isinf(scale) else (1 + scale / new_size) / (1 + scale / size)

    return [ratio(factor * block.scale) for block in blocks]


def ratio_interval(blocks: Sequence[NoiseBlock], *, size: int, new_size: int) -> tuple[float, float]:
    """Returns the interval in which steps(B) / steps(B0) is expected in 9 of 10 runs.

    Three errors of the predicted ratio r, independent of each other, are added in logarithms. The ends are

        r exp(-sqrt(ln(r / r-)^2 + (z e)^2 + (z s)^2)) and r exp(sqrt(ln(r+ / r)^2 + (z e)^2 + (z s)^2))

    with z = `TWO_SIDED_90`; r- and r+, the least and the greatest ratio with noise scales of `LATER_NOISE` times those
    of the probe; e = `FORMULA_ERROR`; and s, the standard error of the mean over the n blocks relative to it: the
    deviation of their ratios / (r sqrt(n)). The ends may lie beyond B0 / B and 1, as measured numbers of steps do.
    """
    ratios = _block_ratios(blocks, size=size, new_size=new_size, factor=1.0)
    ratio, num = statistics.fmean(ratios), len(ratios)
    later = [steps_ratio(blocks, size=size, new_size=new_size, factor=factor) for factor in LATER_NOISE]
    spread = statistics.stdev(ratios) / (ratio * math.sqrt(num)) if num > 1 else 0.0
    error = TWO_SIDED_90 * math.hypot(FORMULA_ERROR, spread)
    low, high = (math.hypot(math.log(end(*later, ratio) / ratio), error) for end in (min, max))
    return ratio * math.exp(-low), ratio * math.exp(high)


def learning_rate_factor(blocks: Sequence[NoiseBlock], *, size: int, new_size: int, rule: str = DAMPED_GAIN) -> float:
    """Returns the factor of the learning rate at batches of B = `new_size` in place of B0 = `size` samples.

    The damped gain (S / B0 + G) / (S / B + G), with the sums over all blocks, lies between 1 and B / B0; or the square
    root of B / B0.
    """
    if rule == SQUARE_ROOT:
        return math.sqrt(new_size / size)
    signal, noise = sum(block.signal for block in blocks), sum(block.noise for block in blocks)
    return (noise / size + signal) / (noise / new_size + signal) if signal or noise else 1.0
