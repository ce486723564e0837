"""Parallelism techniques: how one job trains on one gang of devices. Importing the package imports no torch.

The package imports no transformers either.
"""

from ringmaster.techniques.data_source import DataSource
from ringmaster.techniques.job import AdaptationSpec, Job
from ringmaster.techniques.job_specs import Adapter, DataSpec, EvaluationSpec, ModelSpec, OptimizerSpec, ScheduleSpec
from ringmaster.techniques.metric import Metric
from ringmaster.techniques.profiles import Profile
from ringmaster.techniques.registry import register
from ringmaster.techniques.technique import GangShape, Technique

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
