"""The adapters of the benchmarks: LoRA jobs on small Llamas in a folder, and the orders of their gangs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ringmaster.techniques import Adapter, DataSpec, EvaluationSpec, Job, ModelSpec, OptimizerSpec, registry
from ringmaster.techniques.processes.order import TRAIN, GangOrder, Slot

HEAD_DIM = 32
VOCABULARY = 2048


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a base, and of a training step of an adapter: `rows` samples of `tokens` each."""

    hidden: int = 128
    layers: int = 4
    tokens: int = 64
    rows: int = 1

    @property
    def name(self) -> str:
        return f"{self.layers} layers of {self.hidden}"


TINY = Size(hidden=32, layers=1)


def save_base(folder: Path, size: Size) -> Path:
    """Saves a Llama with random weights in Hugging Face's format; returns its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = folder / f"base-{size.hidden}-{size.layers}"
    if not path.exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=size.hidden,
            intermediate_size=8 * size.hidden // 3 // 8 * 8,
            num_hidden_layers=size.layers,
            num_attention_heads=max(size.hidden // HEAD_DIM, 1),
            num_key_value_heads=max(size.hidden // HEAD_DIM, 1),
            vocab_size=VOCABULARY,
        )
        LlamaForCausalLM(config).save_pretrained(path)
    return path


def jobs_on(base: Path, size: Size, *, num: int, steps: int, ranks: Sequence[int] = (8,)) -> list[Job]:
    """Returns LoRA jobs on one base: the ranks in turn, each with its own learning rate, every other one clipped."""
    plain = Job(
        name="adapter",
        model=ModelSpec(from_pretrained=str(base)),
        data=DataSpec(source="python-stdlib", seq_len=size.tokens),
        global_batch_size=size.rows,
        num_steps=steps,
        evaluation=EvaluationSpec(max_batches=1),
    )
    return [
        replace(
            plain,
            name=f"adapter-{i}",
            adapter=Adapter(rank=ranks[i % len(ranks)]),
            optimizer=OptimizerSpec(lr=1e-4 * (i + 1)),
            clip_grad_norm=1.0 if i % 2 else None,
        )
        for i in range(num)
    ]


def order_of(job: Job, folder: Path, *, cores: Sequence[int] = (), cache: Path | None = None) -> GangOrder:
    """Returns the order to train a job under `single`; `folder` gets checkpoints, model and prepared data."""
    return GangOrder(
        purpose=TRAIN,
        job=job,
        technique=registry.dotted_path("single"),
        config={"micro_batch": job.global_batch_size, "recompute": "none"},
        slots=(Slot(kind="cpu", index=0, cores=tuple(cores)),),
        folder=str(folder / job.name / "gang"),
        cache_dir=str(cache or folder),
        checkpoint_dir=str(folder / job.name / "checkpoints"),
        model_dir=str(folder / job.name / "model"),
        last_step=job.total_steps,
    )
