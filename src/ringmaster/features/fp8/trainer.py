"""Linear layers whose products are computed in fp8, in the training of a job."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ringmaster.compat.torchao import float8_linear, quieted
from ringmaster.extras import require_extra
from ringmaster.features.fp8.job import WHY_NOT_ON_CPU, Float8
from ringmaster.techniques.models.layers import layer_names
from ringmaster.techniques.training.bound_loss import BoundLoss
from ringmaster.techniques.training.callbacks import JobContext, TrainerCallback, TrainerContext

RECIPE = "rowwise_with_gw_hp"
MULTIPLE = 16  # the sides of matrices, for products in fp8
LEAST_CAPABILITY = (8, 9)


class Float8Callback(TrainerCallback):
    """Computes the linear layers of a job's repeated layers in fp8."""

    @classmethod
    def is_for(cls, context: JobContext) -> bool:
        """Returns whether the job computes in fp8; evaluations are of models in bf16."""
        return context.technique is not None and context.job.feature(Float8) is not None

    def change_model(self, trainer: TrainerContext, model: nn.Module, loss: BoundLoss) -> BoundLoss:
        """Replaces the linear layers. Raises ValueError where there are none, or where the device cannot compute so."""
        feature = trainer.job.feature(Float8)
        assert feature is not None
        if not feature.emulate and (reason := why_no_products(trainer.ranks.device)):
            raise ValueError(f"{reason}. To fix: set precision to bf16")
        convert(model, emulate=feature.emulate)
        return loss


TRAINER_CALLBACKS = (Float8Callback,)


def why_no_products(device: torch.device) -> str:
    """Returns why a device cannot multiply in fp8; empty where it can."""
    if device.type != "cuda":
        return WHY_NOT_ON_CPU
    capability = torch.cuda.get_device_capability(device)
    if capability >= LEAST_CAPABILITY:
        return ""
    of_device, least = (".".join(map(str, each)) for each in (capability, LEAST_CAPABILITY))
    return f"precision: fp8 needs compute capability {least}, and {torch.cuda.get_device_name(device)} has {of_device}"


WITHOUT_VALUES = {"why_no_products": lambda device: ""}
"""What takes the place of functions of this module in estimates on tensors that have no values."""


def convert(model: nn.Module, *, emulate: bool = False) -> nn.Module:
    """Replaces linear layers by those that multiply in fp8, in place; parameters stay the same objects.

    Those are the linear layers (torch.nn.Linear) within the repeated layers whose sides are multiples of 16, as fp8
    needs. So a head and embeddings stay in bf16. Raises ValueError where there are none, or without torchao.
    """
    require_extra("torchao", feature="precision: fp8")
    num_converted = 0
    for layer in layer_names(model):
        for name, module in list(model.get_submodule(layer).named_modules(prefix=layer)):
            if type(module) is nn.Linear and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE):
                model.set_submodule(name, _layer_class().from_float(module, config=_config(emulate)))
                num_converted += 1
    if not num_converted:
        raise ValueError(
            f"precision: fp8: {type(model).__name__} has no linear layers (torch.nn.Linear) in repeated layers whose "
            f"sides are multiples of {MULTIPLE}. To fix: set precision to bf16"
        )
    return model


def _config(emulate: bool) -> Any:
    quieted()
    from torchao.float8 import Float8LinearConfig

    return replace(Float8LinearConfig.from_recipe_name(RECIPE), emulate=emulate)


@cache
def _layer_class() -> Any:
    """Returns the class of the layers; torchao is imported by jobs in fp8 alone."""
    base: Any = float8_linear()

    class LinearInFloat8(base):  # type: ignore[misc]
        """torchao's linear layer, under the autocast of any device, and as a plain layer in evaluations.

        A model is evaluated and scored in bf16, whether it is being trained or not, and on any device.
        """

        def forward(self, x: Tensor) -> Tensor:
            """Maps [..., in] to [..., out]."""
            if not self.training:
                return functional.linear(x, self.weight, self.bias)
            kind = x.device.type
            x = x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
            with torch.autocast(kind, enabled=False):
                output: Tensor = super().forward(x)
            return output

    return LinearInFloat8
