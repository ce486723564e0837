"""How one job trains on one gang of devices. Importing this package imports neither torch nor transformers."""

from techniques.job import (
    AdaptationSpec,
    Adapter,
    DataSpec,
    EvaluationSpec,
    Job,
    ModelSpec,
    OptimizerSpec,
    ScheduleSpec,
)
from techniques.profiles import Profile
from techniques.registry import register
from techniques.technique import GangShape, Technique

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
