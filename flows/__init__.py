"""What a person or a schedule starts: one readable flow a file, and the command line.

from flows import Batch, BatchFailed, profile_batch, train_batch
from techniques import DataSpec, Job, ModelSpec, OptimizerSpec, register

jobs = [Job(name=f"llama-{lr}", model=..., data=..., optimizer=OptimizerSpec(lr=lr), num_steps=100) for lr in rates]
register(MyTechnique)
batch = Batch.of(name="sweep", jobs=jobs).to_json()
print(profile_batch(batch).profiled.profiles)
try:
    print(train_batch(batch).jobs)
except BatchFailed as failed:  # some jobs are not done
    print(failed, failed.result.jobs)
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flows.faults import BatchFailed, RingmasterError
    from flows.profile_batch import profile_batch
    from flows.result import BatchResult
    from flows.train_batch import train_batch
    from tasks.batch import Batch

__all__ = ["Batch", "BatchFailed", "BatchResult", "RingmasterError", "profile_batch", "train_batch"]

_HOMES = {
    "Batch": "tasks.batch",
    "BatchFailed": "flows.faults",
    "BatchResult": "flows.result",
    "RingmasterError": "flows.faults",
    "profile_batch": "flows.profile_batch",
    "train_batch": "flows.train_batch",
}


class _Package(ModuleType):
    """Keeps `flows.train_batch` the flow: importing its module would bind the module to the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: Prefect reads its settings then, so they are made before."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flows import settings

    settings.embed(settings.home())
    return getattr(import_module(_HOMES[name]), name)
