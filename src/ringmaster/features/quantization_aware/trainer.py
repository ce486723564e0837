"""Linear layers that round weights and inputs in training, as the quantized model will."""

from __future__ import annotations

from torch import nn

from ringmaster.compat.torchao import quieted
from ringmaster.extras import require_extra
from ringmaster.techniques.job import QUANTIZATION_AWARE, AdaptationSpec
from ringmaster.techniques.models.quantization import int4_layers, torchao_config
from ringmaster.techniques.processes.order import TRAIN, TRIAL
from ringmaster.techniques.training.bound_loss import BoundLoss
from ringmaster.techniques.training.callbacks import JobContext, TrainerCallback, TrainerContext


class QuantizationAwareCallback(TrainerCallback):
    """Prepares a model for quantization; its weights stay in floating point, and so does its export."""

    @classmethod
    def is_for(cls, context: JobContext) -> bool:
        """Returns whether the job learns with the rounding of 4 bits, and is trained."""
        how = context.job.adaptation
        is_trained = context.technique is not None and context.order.purpose in (TRAIN, TRIAL)
        return is_trained and how is not None and how.kind == QUANTIZATION_AWARE

    def change_model(self, trainer: TrainerContext, model: nn.Module, loss: BoundLoss) -> BoundLoss:
        """Replaces the linear layers, which round in the evaluations of the job, too."""
        how = trainer.job.adaptation
        assert how is not None
        prepare(model, how)
        return loss


TRAINER_CALLBACKS = (QuantizationAwareCallback,)


def prepare(model: nn.Module, adaptation: AdaptationSpec) -> nn.Module:
    """Replaces linear layers by torchao's that round, in place; parameters stay the same objects.

    In the forward, weights are rounded to 4 bits with a scale for each group of a row, and inputs, by the method
    dynamic-int8-int4, to 8 bits with a scale and a zero point for each token. The backward takes a rounding as the
    identity (straight-through estimator: Bengio et al., arXiv:1308.3432). Raises ValueError where no layer suits, or
    without torchao.
    """
    require_extra("torchao", feature=QUANTIZATION_AWARE)
    quieted()
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    names = {*int4_layers(model, group_size=adaptation.group_size)}
    base = torchao_config(adaptation.method, group_size=adaptation.group_size)
    config = QATConfig(base, step="prepare")
    quantize_(model, config, filter_fn=lambda _, name: name in names)
    return model
