"""A user's own technique: replicas that exchange all their gradients in one message, after the backward pass.

`ddp` sends them in buckets during the backward pass; for small models one message may be faster. Profiling measures
which of the two is faster for a job.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ringmaster import DataParallel
from ringmaster.techniques.technique import Config
from ringmaster.techniques.training.recomputation import recompute_layers


class OneMessage(DataParallel):
    """Replicates the model on each device; a single all-reduce a step sums the gradients."""

    name = "one-message"
    summary = "a replica a device, all gradients summed by a single all-reduce"
    needs = "two devices or more; the whole training state in each device's memory; a divisible batch"

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """Returns the model without a layout: all replicas start with the same weights."""
        recompute_layers(model, config["recompute"])
        return model

    @contextmanager
    def accumulate(self, model: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Wraps one micro-batch's forward and backward; exchanges the gradients after the last one."""
        yield
        if is_last:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def gradient_divisor(self, mesh: DeviceMesh | None) -> int:
        """Returns 1: the all-reduce sums and does not average."""
        return 1
