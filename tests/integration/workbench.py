"""Tiny jobs and the quick gangs that train them: the tests' access to the runtime, without planner and flows."""

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ringmaster.codec import digest
from ringmaster.techniques import DataSpec, EvaluationSpec, Job, ModelSpec, OptimizerSpec, registry
from ringmaster.techniques.data import prepare
from ringmaster.techniques.estimates.job_preflight import with_probe
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.models.facts import model_facts
from ringmaster.techniques.probing import probe
from ringmaster.techniques.processes.channel import Channel
from ringmaster.techniques.processes.forkserver_client import ForkServer
from ringmaster.techniques.processes.gang import Gang
from ringmaster.techniques.processes.gang_events import Event, Outcome, Steps
from ringmaster.techniques.processes.order import TRAIN, GangOrder, Slot, rank_argument
from ringmaster.techniques.technique import GangShape

ARCHITECTURES = (
    "LlamaForCausalLM",
    "GPT2LMHeadModel",
    "ViTForImageClassification",
    "ResNetForImageClassification",
)
LLAMA = ModelSpec(
    architecture="LlamaForCausalLM",
    config={
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
)
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2}
GPT2_WITH_DROPOUT = ModelSpec(architecture="GPT2LMHeadModel", config=_GPT2)
GPT2 = ModelSpec(
    architecture="GPT2LMHeadModel", config={**_GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
)
VIT = ModelSpec(
    architecture="ViTForImageClassification",
    config={
        "patch_size": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
)
RESNET = ModelSpec(
    architecture="ResNetForImageClassification",
    config={"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
)
DIGITS = DataSpec(source="digits")
SGD = OptimizerSpec(name="sgd", lr=0.1)
ADAMW = OptimizerSpec(name="adamw", lr=1e-3)

NOT_BY_GLOO = ("tensor", "pipeline", "mesh")

SYLLABLES = [first + second for first in "bdfklmnprst" for second in ("a", "e", "i", "o", "u", "an", "or")]


def write_prose(file: Path, *, num_lines: int = 600) -> Path:
    """Writes generated text, equal on every machine and in every version of Python."""
    draw = random.Random(1)

    def word() -> str:
        return "".join(SYLLABLES[int(draw.random() ** 2 * len(SYLLABLES))] for _ in range(1 + int(draw.random() * 3)))

    file.write_text("".join(" ".join(word() for _ in range(9)) + ".\n" for _ in range(num_lines)))
    return file


@dataclass(frozen=True)
class Layout:
    """An option: a technique on a number of devices under a config. A dotted path names a technique of the tests."""

    technique: str
    num_devices: int = 1
    config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        knobs = ",".join(f"{key}={value}" for key, value in self.config.items())
        return f"{self.technique.rpartition(':')[2]}x{self.num_devices}({knobs})"

    @property
    def path(self) -> str:
        return self.technique if ":" in self.technique else registry.dotted_path(self.technique)


SINGLE = Layout("single")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The outcome of a gang, its events, and its order."""

    outcome: Outcome
    events: list[Event]
    order: GangOrder

    @property
    def losses(self) -> list[float]:
        return [loss for event in self.events if isinstance(event, Steps) for loss in event.losses]

    @cached_property
    def weights(self) -> dict[str, Any]:
        assert self.outcome.status == "done", self.outcome
        return weights_in(Path(self.order.model_dir or ""))

    def said(self, event: str) -> list[Event]:
        return [e for e in self.events if event == e.NAME]


def weights_in(folder: Path) -> dict[str, Any]:
    adapter = folder / "adapter_model.safetensors"
    return load_file(adapter if adapter.is_file() else folder / "model.safetensors")


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def is_bit_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(bool((one[name] == other[name]).all()) for name in one)


def _cores_in_turn() -> list[int]:
    """Returns the cores of this machine, in an order that starts at another core for each pytest worker."""
    cores = sorted(os.sched_getaffinity(0))
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(cores)
    return cores[first:] + cores[:first]


class SharedGpuServer(ForkServer):
    """A fork server of ranks that share GPUs."""

    def start_rank(self, order: GangOrder, *, rank: int, log: Path) -> Channel:
        """Starts one rank, as `ForkServer` does."""
        return self.spawn(target="tests.integration.shared_gpu:main", argument=rank_argument(order, rank=rank), log=log)


class Workbench:
    """Trains jobs in gangs of one fork server. Slots share the cores of this machine, or its GPUs.

    num_gpus: 0 for slots of cores.
    """

    def __init__(self, server: ForkServer, folder: Path, *, num_gpus: int = 0) -> None:
        self.server, self._folder, self.num_gpus = server, folder, num_gpus
        self.cache_dir = folder / "cache"
        self.cache_dir.mkdir()
        self.prose = DataSpec(path=str(write_prose(folder / "prose.txt")), seq_len=24, vocab_size=300)
        self._cores = _cores_in_turn()
        self._references: dict[str, Trained] = {}

    def job(self, model: ModelSpec = LLAMA, **changes: Any) -> Job:
        """Returns a tiny job; its data are images where the model needs images."""
        images = "Image" in (model.architecture or "")
        plain = Job(
            name="tiny",
            model=model,
            data=DIGITS if images else self.prose,
            optimizer=SGD,
            num_steps=5,
            global_batch_size=8,
            evaluation=EvaluationSpec(max_batches=1),
        )
        return replace(plain, **changes)

    def facts(self, job: Job) -> ModelFacts:
        """Returns the facts about the job's model that are known before planning."""
        data = prepare(job.data, cache_dir=self.cache_dir)
        facts = model_facts(job.model, data=data, adapter=job.adapter, frozen=job.freeze, base_changes=job.base_changes)
        return with_probe(facts, probe(job, data=data, cache_dir=self.cache_dir), job)

    def shape(self, num_devices: int) -> GangShape:
        return GangShape(kind="gpu" if self.num_gpus else "cpu", num_devices=num_devices, memory_bytes=1 << 33)

    def slot(self, index: int) -> Slot:
        if self.num_gpus:
            return Slot(kind="gpu", index=index % self.num_gpus, memory_bytes=1 << 33)
        core = self._cores[index % len(self._cores)]
        return Slot(kind="cpu", index=index, cores=(core,), memory_bytes=1 << 33)

    def order(self, job: Job, layout: Layout, folder: Path, **changes: Any) -> GangOrder:
        order = GangOrder(
            purpose=TRAIN,
            job=job,
            technique=layout.path,
            config={"micro_batch": job.global_batch_size // layout.num_devices, "recompute": "none", **layout.config},
            slots=tuple(self.slot(i) for i in range(layout.num_devices)),
            folder=str(folder / "gang"),
            cache_dir=str(self.cache_dir),
            checkpoint_dir=str(folder / "checkpoints"),
            model_dir=str(folder / "model"),
            last_step=job.total_steps,
            ordered_at_s=time.monotonic(),
        )
        return replace(order, **changes)

    def start(self, order: GangOrder) -> Gang:
        if 0 < self.num_gpus < order.num_devices and registry.load(order.technique).name in NOT_BY_GLOO:
            pytest.skip("gloo neither sends nor scatters tensors of a GPU, and NCCL refuses ranks that share one")
        num_ranks = registry.load(order.technique).num_ranks(self.shape(len(order.slots)))
        return Gang(self.server, order, num_ranks=num_ranks)

    def train(
        self,
        job: Job,
        layout: Layout,
        folder: Path,
        *,
        on_event: Callable[[Gang, Event], None] = lambda *_: None,
        **changes: Any,
    ) -> Trained:
        """Runs one gang to its end in `folder`, which may hold checkpoints of earlier gangs."""
        order = self.order(job, layout, folder, **changes)
        gang, events = self.start(order), list[Event]()

        def handle_event(event: Event) -> None:
            events.append(event)
            on_event(gang, event)

        return Trained(outcome=gang.wait(handle_event), events=events, order=order)

    def reference(self, job: Job, layout: Layout = SINGLE) -> Trained:
        """Returns the job trained undisturbed, by default by `single` on one slot; trains each job once."""
        name = digest([job, layout])
        if name not in self._references:
            self._references[name] = self.train(job, layout, self._folder / name)
        return self._references[name]
