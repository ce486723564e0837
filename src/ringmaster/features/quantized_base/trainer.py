"""Stores the linear layers of the frozen base of an adapter in 4 bits, before the adapter is attached."""

from __future__ import annotations

from torch import nn

from ringmaster.features.quantized_base.job import QuantizedBase
from ringmaster.techniques.job_specs import Adapter
from ringmaster.techniques.models.quantization import quantize_base
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.training.callbacks import TrainerCallback


class QuantizedBaseCallback(TrainerCallback):
    """Stores the base of an adapter in 4 bits."""

    @classmethod
    def change_base(cls, order: GangOrder, model: nn.Module, adapter: Adapter | None) -> None:
        """Replaces the linear layers in place."""
        if adapter is not None and order.job.feature(QuantizedBase) is not None:
            quantize_base(model, adapter)


TRAINER_CALLBACKS = (QuantizedBaseCallback,)
