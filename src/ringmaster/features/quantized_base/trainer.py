"""Stores the linear layers of the frozen base of an adapter in 4 bits, before the adapter is attached."""

from __future__ import annotations

from torch import nn

from ringmaster.features.quantized_base.job import QuantizedBase
from ringmaster.techniques.job import Adapter
from ringmaster.techniques.models.quantization import quantize_base
from ringmaster.techniques.training.parts import TrainerPart, TrainingState


class QuantizedBasePart(TrainerPart):
    """Stores the base of an adapter in 4 bits."""

    @classmethod
    def is_for(cls, state: TrainingState) -> bool:
        """Returns whether the job has a base in 4 bits."""
        return state.job.part(QuantizedBase) is not None

    def change_base(self, model: nn.Module, adapter: Adapter | None) -> None:
        """Replaces the linear layers in place."""
        if adapter is not None:
            quantize_base(model, adapter)


PARTS = (QuantizedBasePart,)
