"""The optimizer and the learning-rate schedule of a job; both are independent of its parallelism."""

from ringmaster.techniques.runtime.training.optimizers.building import build_optimizer, update_
from ringmaster.techniques.runtime.training.optimizers.schedules import learning_rate, schedule_factor

__all__ = ["build_optimizer", "learning_rate", "schedule_factor", "update_"]
