"""How one job trains on one gang of devices. Importing this package imports neither torch nor transformers."""

from ringmaster.techniques.job import (
    AdaptationSpec,
    Adapter,
    DataSpec,
    EvaluationSpec,
    Job,
    ModelSpec,
    OptimizerSpec,
    ScheduleSpec,
)
from ringmaster.techniques.profiles import Profile
from ringmaster.techniques.registry import register
from ringmaster.techniques.technique import GangShape, Technique

__all__ = [
    "AdaptationSpec",
    "Adapter",
    "DataSpec",
    "EvaluationSpec",
    "GangShape",
    "Job",
    "ModelSpec",
    "OptimizerSpec",
    "Profile",
    "ScheduleSpec",
    "Technique",
    "register",
]
