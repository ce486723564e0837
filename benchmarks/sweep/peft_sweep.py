"""The sweep as it is usually written: transformers' Trainer and peft, one configuration after another.

    python benchmarks/sweep/peft_sweep.py SWEEP.json      # trains every configuration, and prints the best

`train` is also what Ray Tune runs (ray_sweep.py). A file of JSON lines gets each evaluation with its time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

EVALUATED_AT_ONCE = 20  # samples


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep: its base, its files of conversations, the settings of all its trials, and the values of each.

    configurations: `lr` and `rank` of each trial.
    evaluated_at: the steps before the last at which Ray compares trials; the last step is evaluated by all.
    """

    base: str
    train: str
    test: str
    folder: str
    threads: int
    alpha: int
    warmup_steps: int
    clip_grad_norm: float
    batch_size: int
    num_steps: int
    configurations: Sequence[Mapping[str, Any]]
    evaluated_at: Sequence[int] = ()

    @classmethod
    def read(cls, file: str) -> Sweep:
        """Reads a sweep from a JSON file."""
        return cls(**json.loads(Path(file).read_text()))

    def note(self, name: str, step: int, loss: float) -> None:
        """Writes an evaluation into the file of all evaluations."""
        with (Path(self.folder) / "evaluations.jsonl").open("a") as file:
            file.write(json.dumps({"name": name, "step": step, "loss": loss, "at": time.time()}) + "\n")


def train(
    sweep: Sweep, name: str, values: Mapping[str, Any], *, report: Callable[[int, float], None] | None = None
) -> float:
    """Trains and saves one adapter; returns its loss on the test rows. report: is called with each evaluation's
    result."""
    torch.manual_seed(0)
    rows, test = read_rows(sweep.base, sweep.train), read_rows(sweep.base, sweep.test)
    collator = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(sweep.base))
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(sweep.base),
        LoraConfig(r=values["rank"], lora_alpha=sweep.alpha, target_modules="all-linear", task_type="CAUSAL_LM"),
    )

    def evaluated(step: int) -> float:
        loss = loss_on(model, test, collator)
        sweep.note(name, step, loss)
        if report is not None:
            report(step, loss)
        return loss

    class Evaluations(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in sweep.evaluated_at:
                evaluated(state.global_step)

    arguments = TrainingArguments(
        output_dir=str(Path(sweep.folder) / "trainer" / name),
        per_device_train_batch_size=sweep.batch_size,
        max_steps=sweep.num_steps,
        learning_rate=values["lr"],
        lr_scheduler_type="linear",
        warmup_steps=sweep.warmup_steps,
        weight_decay=0.01,
        max_grad_norm=sweep.clip_grad_norm,
        optim="adamw_torch_fused",
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows, data_collator=collator, callbacks=[Evaluations()]
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    model.save_pretrained(Path(sweep.folder) / name)
    return evaluated(sweep.num_steps)


@cache
def read_rows(base: str, file: str) -> list[dict[str, list[int]]]:
    """Returns the samples of a file, which are encoded once in a process."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    return [encoded(tokenizer, line) for line in Path(file).read_text().splitlines()]


def encoded(tokenizer: Any, line: str) -> dict[str, list[int]]:
    """Returns the tokens of a conversation, with labels for those of the answer, as TRL's trainer makes them."""
    messages = json.loads(line)["messages"]
    tokens = tokenizer.apply_chat_template(messages, return_dict=False)
    question = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    return {"input_ids": tokens, "labels": [-100] * len(question) + tokens[len(question) :]}


@torch.no_grad()
def loss_on(model: Any, rows: Sequence[Mapping[str, Any]], collator: Any) -> float:
    """Returns the mean loss over all tokens that have labels."""
    was_training, total, count = model.training, 0.0, 0
    model.eval()
    by_length = sorted(rows, key=lambda row: len(row["input_ids"]))
    for start in range(0, len(by_length), EVALUATED_AT_ONCE):
        batch = collator(by_length[start : start + EVALUATED_AT_ONCE])
        num = int((batch["labels"][:, 1:] != -100).sum())
        total += model(**batch).loss.item() * num
        count += num
    model.train(was_training)
    return total / count


def main() -> None:
    """Trains every configuration of the sweep."""
    sweep = Sweep.read(sys.argv[1])
    torch.set_num_threads(sweep.threads)
    losses = {
        f"trial-{number:02}": train(sweep, f"trial-{number:02}", values)
        for number, values in enumerate(sweep.configurations)
    }
    best = min(losses, key=losses.__getitem__)
    print(json.dumps({"best": best, "loss": losses[best], "model": str(Path(sweep.folder) / best)}))


if __name__ == "__main__":
    main()
