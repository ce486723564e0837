"""Samples of an endpoint in turns of a few tokens, between which it computes what others ask for.

What was computed of a sample, its keys and values above all, stays in memory until it is complete or given up. A sample
has the bits that it has at once (`sampler`), so an endpoint that was killed begins it again.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch

from ringmaster.features.endpoint.compute.requests import RequestRefusal, SampleResult, SamplingRequest
from ringmaster.features.endpoint.compute.sampler import OpenSample, TokenSampler
from ringmaster.techniques.models.adapters import first_state, sites
from ringmaster.techniques.models.peft_format import ADAPTER_WEIGHTS, read_adapter
from ringmaster.techniques.multi_adapter.adapter_runs import AdapterModules, adapter_modules_of
from ringmaster.techniques.multi_adapter.multi_adapter_base import MultiAdapterBase


class SamplingTurns:
    """The samples that are not complete yet.

    modules_of: returns the adapter of a request, and raises ValueError or OSError where it cannot be answered.
    is_together: whether samples are computed together; else one after another.
    """

    def __init__(
        self, sampler: TokenSampler, *, modules_of: Callable[[SamplingRequest], AdapterModules], is_together: bool
    ) -> None:
        self._sampler, self._modules_of, self._is_together = sampler, modules_of, is_together
        self._open: dict[str, OpenSample] = {}

    def take(
        self, requests: Mapping[str, SamplingRequest], *, num_tokens: int, begun: Collection[str]
    ) -> dict[str, SampleResult | RequestRefusal | None]:
        """Samples up to `num_tokens` further tokens for each request; returns None for one that goes on.

        requests: by names. A client's weights must not change before its sample is complete.
        begun: the names of all samples that go on, of which this turn may leave some out. The others are given up.
        """
        self._open = {name: each for name, each in self._open.items() if name in begun}
        refused: dict[str, RequestRefusal] = {}
        for name, request in requests.items():
            if name not in self._open:
                try:
                    self._open[name] = self._sampler.begun(request, self._modules_of(request))
                except (ValueError, OSError) as error:
                    refused[name] = RequestRefusal(reason=str(error))
        taken = {name: self._open[name] for name in requests if name not in refused}
        for chunk in [[*taken.values()]] if self._is_together else [[each] for each in taken.values()]:
            self._sampler.go_on(chunk, num_tokens=num_tokens)
        results = {name: None if each.live else each.result() for name, each in taken.items()}
        self._open = {name: each for name, each in self._open.items() if each.live}
        return {name: refused[name] if name in refused else results[name] for name in requests}


class SampledCheckpoints:
    """The adapters of checkpoints that sample, read once each. max_kept: the most that are kept in memory."""

    def __init__(self, stem: MultiAdapterBase, *, device: torch.device, max_kept: int) -> None:
        self._stem, self._device, self._max_kept = stem, device, max_kept
        self._kept: dict[tuple[Path, int], AdapterModules] = {}

    def modules(self, folder: Path) -> AdapterModules:
        """Returns the adapter in a folder. Raises ValueError or OSError where there is none that can be served."""
        file = folder / ADAPTER_WEIGHTS
        written = file.stat().st_mtime_ns if file.is_file() else 0
        key = (folder, written)
        if key not in self._kept:
            adapter = read_adapter(folder)
            if adapter.kind != "lora" or adapter.dora or adapter.modules_to_save:
                raise ValueError(f"{folder.name} is not a plain LoRA, which alone is served")
            at = sites(self._stem.model, adapter)
            state = first_state(self._stem.model, adapter, at, seed=0)
            self._stem.open(at)
            if len(self._kept) >= self._max_kept:
                del self._kept[next(iter(self._kept))]
            on_device = {name: value.to(self._device) for name, value in state.items()}
            self._kept[key] = adapter_modules_of(adapter, at, (), on_device)
        return self._kept[key]
