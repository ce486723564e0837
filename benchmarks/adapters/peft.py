"""The same adapters trained by peft: in a plain loop of torch, and by Hugging Face's Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainingArguments

from ringmaster.techniques import Job
from ringmaster.techniques.data import fetch, open_data, prepare, sampler_of
from ringmaster.techniques.models.adapters import first_state, sites

PREFIX = "base_model.model."  # of peft's parameter names
WEIGHT_DECAY = 0.01  # torch's default, which Ringmaster uses too


def peft_model(job: Job) -> PeftModel:
    """Returns the job's base with peft's adapter attached, at Ringmaster's initial values."""
    model = AutoModelForCausalLM.from_pretrained(job.model.from_pretrained)
    found = sites(model, job.adapter)
    first = first_state(model, job.adapter, found, seed=job.seed)
    config = LoraConfig(
        r=job.adapter.rank,
        lora_alpha=job.adapter.alpha,
        target_modules=[site.name for site in found],
        task_type="CAUSAL_LM",
        lora_dropout=0.0,
    )
    model = get_peft_model(model, config)
    set_peft_model_state_dict(model, {PREFIX + name: value for name, value in first.items()})
    return model


class PeftLoop:
    """A handwritten loop: forward, backward, clip, step; nothing is recorded, evaluated or saved."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job, self._steps_done = job, 0
        prepared = prepare(job.data, cache_dir=folder)
        self._rows, _ = open_data(job.data, cache_dir=folder, prepared=prepared)
        self._sampler = sampler_of(job, self._rows)
        self.model = peft_model(job).train()
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=job.optimizer.lr, weight_decay=WEIGHT_DECAY, fused=True)

    def state(self) -> dict[str, Tensor]:
        """Returns the trained tensors, by Ringmaster's names."""
        state = get_peft_model_state_dict(self.model)
        return {name.removeprefix(PREFIX): value for name, value in state.items()}

    def step(self) -> None:
        """Trains on the next batch."""
        batch = fetch(self._rows, self._sampler.indices(self._steps_done))
        self._steps_done += 1
        self.model(**batch).loss.backward()
        if self._job.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_(self._trained, self._job.clip_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()


def train_by_trainer(job: Job, folder: Path, cache: Path) -> None:
    """Trains a job by Hugging Face's Trainer to its last step, and saves the adapter."""
    prepared = prepare(job.data, cache_dir=cache)
    rows, _ = open_data(job.data, cache_dir=cache, prepared=prepared)
    model = peft_model(job)
    sampler = sampler_of(job, rows)
    order = [int(i) for step in range(job.total_steps) for i in sampler.indices(step)]
    arguments = TrainingArguments(
        output_dir=str(folder / job.name / "trainer"),
        per_device_train_batch_size=job.global_batch_size,
        max_steps=job.total_steps,
        learning_rate=job.optimizer.lr,
        lr_scheduler_type="constant",
        max_grad_norm=job.clip_grad_norm or 0.0,
        weight_decay=WEIGHT_DECAY,
        optim="adamw_torch_fused",
        train_sampling_strategy="sequential",
        dataloader_num_workers=0,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Ordered(rows, order))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    model.save_pretrained(folder / job.name / "model")


class Ordered:
    """The rows of a data set in a given order."""

    def __init__(self, rows: Sequence, order: Sequence[int]) -> None:
        self.rows, self.order = rows, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int):
        return self.rows[self.order[index]]
