"""Training of one job on one gang of devices: the parallelism techniques, and the trainer, data and models they share.

Importing the package imports neither torch nor transformers.
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
