"""The optimizer and the learning-rate schedule of a job; both are independent of its parallelism."""

from ringmaster.techniques.training.optimizers.building import build_optimizer, check_options, update_
from ringmaster.techniques.training.optimizers.schedules import learning_rate, schedule_factor
from ringmaster.techniques.training.optimizers.settings import ParameterSettings, parameter_settings

__all__ = [
    "ParameterSettings",
    "build_optimizer",
    "check_options",
    "learning_rate",
    "parameter_settings",
    "schedule_factor",
    "update_",
]
