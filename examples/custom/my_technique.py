"""A user's own technique: replicas that exchange all their gradients in one message, after the backward pass.

`ddp` sends them in buckets while backward still runs; for small models one message may be quicker. Which of the two
it is, on which job, is measured: that is what profiling is for.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ringmaster import DataParallel
from ringmaster.techniques.interface.technique import Config
from ringmaster.techniques.runtime.training.recomputation import recompute_layers


class OneMessage(DataParallel):
    """A replica a device; its gradients are summed by a single all-reduce a step."""

    name = "one-message"
    summary = "a replica a device, all gradients summed by a single all-reduce"
    needs = "two devices or more; the whole training state in each device's memory; a divisible batch"

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """Every replica began with the same weights: there is nothing to lay out."""
        recompute_layers(model, config["recompute"])
        return model

    @contextmanager
    def accumulate(self, model: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Around one micro-batch's forward and backward; the gradients are exchanged after the last one's."""
        yield
        if is_last:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def gradient_divisor(self, mesh: DeviceMesh | None) -> int:
        """The all-reduce adds and does not average."""
        return 1
