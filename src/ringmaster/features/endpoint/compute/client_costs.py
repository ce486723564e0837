"""What one more client costs: seconds of a computation, fitted to those that were measured, and memory."""

import resource
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from ringmaster.features.endpoint.compute.client_adapter import lora_of
from ringmaster.features.endpoint.compute.requests import AdapterSpec
from ringmaster.techniques.models.adapters import sites
from ringmaster.techniques.offload import host_memory_bytes

NUM_KEPT = 64
BYTES_OF_A_PARAMETER = 20
"""A weight, its gradient and Adam's two moments, and the copy in which the weight or a sum of gradients is stored."""


class ComputationTimes:
    """The newest computations: their tokens, clients and seconds. One of n tokens takes about a + b n seconds."""

    def __init__(self) -> None:
        self._known: deque[tuple[int, int, float]] = deque(maxlen=NUM_KEPT)

    def note(self, *, num_tokens: int, num_clients: int, seconds: float) -> None:
        """Adds a computation."""
        self._known.append((num_tokens, num_clients, seconds))

    @property
    def can_predict(self) -> bool:
        """Whether computations of different sizes are known."""
        return len({tokens for tokens, _, _ in self._known}) > 1

    def tokens_of_a_client(self) -> float:
        """Returns the mean tokens of one client in a computation."""
        return sum(tokens for tokens, _, _ in self._known) / sum(clients for _, clients, _ in self._known)

    def seconds_of(self, num_clients: int) -> float:
        """Returns the seconds of one computation of as many clients."""
        tokens, seconds = np.array([(tokens, seconds) for tokens, _, seconds in self._known]).T
        slope = max(0.0, float(np.cov(tokens, seconds)[0, 1] / np.var(tokens, ddof=1)))
        constant = max(0.0, float(np.median(seconds - slope * tokens)))
        return constant + slope * self.tokens_of_a_client() * num_clients if num_clients else 0.0


def adapter_bytes(specs: Sequence[AdapterSpec], model: nn.Module) -> int:
    """Returns the memory that the state of such adapters takes."""
    return sum(
        BYTES_OF_A_PARAMETER * spec.rank * (site.num_in + site.num_out)
        for spec in specs
        for site in sites(model, lora_of(spec, model))
    )


def used_bytes(device: torch.device) -> int:
    """Returns the most memory that computations have taken so far: of the device, or of this process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available_bytes(device: torch.device) -> int:
    """Returns the memory of the device, or of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory_bytes()
