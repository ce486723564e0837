"""Trains batches of deep-learning models: one optimizer chooses parallelism, devices and schedule.

from ringmaster import Batch, BatchFailed, DataSpec, Job, ModelSpec, OptimizerSpec, train_batch

model = ModelSpec(architecture="LlamaForCausalLM", config={"hidden_size": 64})
data = DataSpec(path="corpus/*.txt", seq_len=128)
jobs = [
    Job(name=f"llama-{lr}", model=model, data=data, optimizer=OptimizerSpec(lr=lr), num_steps=100)
    for lr in (1e-4, 3e-4, 1e-3)
]
try:
    print(train_batch(Batch.of(name="rates", jobs=jobs).to_json()).jobs)
except BatchFailed as failed:  # some jobs did not finish
    print(failed, failed.result.jobs)

Each name is imported when it is first used, so describing jobs imports neither torch nor Prefect.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringmaster.errors import BatchFailed, RingmasterError
    from ringmaster.flows.batch.dry_run import profile_batch
    from ringmaster.flows.batch.result import BatchResult
    from ringmaster.flows.train_batch import train_batch
    from ringmaster.tasks.batch import Batch
    from ringmaster.techniques import (
        AdaptationSpec,
        Adapter,
        DataSource,
        DataSpec,
        EvaluationSpec,
        Job,
        Metric,
        ModelSpec,
        OptimizerSpec,
        ScheduleSpec,
        Technique,
        register,
    )
    from ringmaster.techniques.data.row_source import RowSource
    from ringmaster.techniques.technique import DataParallel

__all__ = [
    "AdaptationSpec",
    "Adapter",
    "Batch",
    "BatchFailed",
    "BatchResult",
    "DataParallel",
    "DataSource",
    "DataSpec",
    "EvaluationSpec",
    "Job",
    "Metric",
    "ModelSpec",
    "OptimizerSpec",
    "RingmasterError",
    "RowSource",
    "ScheduleSpec",
    "Technique",
    "profile_batch",
    "register",
    "train_batch",
]

_MODULES = {
    "Batch": "ringmaster.tasks.batch",
    "BatchFailed": "ringmaster.errors",
    "BatchResult": "ringmaster.flows.batch.result",
    "DataParallel": "ringmaster.techniques.technique",
    "RingmasterError": "ringmaster.errors",
    "RowSource": "ringmaster.techniques.data.row_source",
    "profile_batch": "ringmaster.flows.batch.dry_run",
    "train_batch": "ringmaster.flows.train_batch",
}
_FLOWS = ("profile_batch", "train_batch")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _FLOWS:  # these import Prefect, which reads its settings on import
        from ringmaster.flows import settings

        settings.prepare_environment(settings.home())
    return getattr(import_module(_MODULES.get(name, "ringmaster.techniques")), name)
