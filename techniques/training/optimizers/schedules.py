"""Learning-rate schedules: each gives a factor of the base learning rate for every step.

With k the step (0-based), N the number of steps, W those of the warm-up, D those of the decay of "wsd", and r the
`min_lr_ratio`:

    k < W       (k + 1) / W                                 linear warm-up
    constant    1
    linear      r + (1 - r) (1 - p)                         p = (k - W) / (N - W)
    cosine      r + (1 - r) (1 + cos(pi p)) / 2             the same p
    wsd         1 before step N - D, then r + (1 - r) (1 - p)    p = (k - (N - D)) / D

After the warm-up these are `get_linear_schedule_with_warmup`, `get_cosine_with_min_lr_schedule_with_warmup` and
`get_wsd_schedule` (decay_type="linear") of transformers. In the warm-up they are one step ahead of transformers, whose
first step has the learning rate 0 and changes nothing. Source of "wsd": Hu et al., MiniCPM (arXiv:2404.06395).
"""

from __future__ import annotations

import math

from ringmaster.techniques.interface.job import Job, ScheduleSpec


def learning_rate(job: Job, step: int) -> float:
    """Returns the learning rate of step `step` (0-based). It depends on the step alone, so no state is restored."""
    return job.optimizer.lr * schedule_factor(job.schedule, step, num_steps=job.total_steps)


def schedule_factor(schedule: ScheduleSpec, step: int, *, num_steps: int) -> float:
    """Returns the factor of the base learning rate at step `step` of `num_steps`."""
    num_warmup = schedule.num_warmup_steps(num_steps)
    if step < num_warmup:
        return (step + 1) / num_warmup
    first = num_steps - schedule.num_decay_steps(num_steps) if schedule.name == "wsd" else num_warmup
    if schedule.name == "constant" or step < first:
        return 1.0
    progress = (step - first) / max(num_steps - first, 1)
    factor = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1.0 - progress
    return factor * (1.0 - schedule.min_lr_ratio) + schedule.min_lr_ratio
