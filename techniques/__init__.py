"""Parallelism techniques: how one job trains on one gang of devices. Importing the package imports no torch.

The package imports no transformers either.
"""

from ringmaster.techniques.interface.data_source import DataSource
from ringmaster.techniques.interface.job import (
    AdaptationSpec,
    Adapter,
    DataSpec,
    EvaluationSpec,
    Job,
    ModelSpec,
    OptimizerSpec,
    ScheduleSpec,
)
from ringmaster.techniques.interface.metric import Metric
from ringmaster.techniques.interface.profiles import Profile
from ringmaster.techniques.interface.registry import register
from ringmaster.techniques.interface.technique import GangShape, Technique

__all__ = [
    "AdaptationSpec",
    "Adapter",
    "DataSource",
    "DataSpec",
    "EvaluationSpec",
    "GangShape",
    "Job",
    "Metric",
    "ModelSpec",
    "OptimizerSpec",
    "Profile",
    "ScheduleSpec",
    "Technique",
    "register",
]
