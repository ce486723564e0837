"""Hugging Face's Trainer as a command that Ringmaster runs: a small Llama that learns the bytes of Python's own help.

Only `Ringmaster`, the callback that implements the protocol (docs/commands.md), is specific to Ringmaster. torchrun
starts the script, one process a device.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

RANK, NUM_RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SEQ_LEN = 64
ENDLESS = 1_000_000


class Text(torch.utils.data.Dataset):
    """Bytes as tokens: sample i is [SEQ_LEN] from i * SEQ_LEN on."""

    def __init__(self, text: bytes) -> None:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.samples = tokens[: len(tokens) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.samples[index], "labels": self.samples[index]}


class Ringmaster(TrainerCallback):
    """Reports steps, saves when due, and stops when requested; all ranks act at the same step."""

    def __init__(self, order: dict, report: Path) -> None:
        self.order, self.report = order, report
        self.is_told_to_stop = False
        self.saved_s = time.monotonic()
        signal.signal(signal.SIGTERM, self.stop)

    def stop(self, *_: object) -> None:
        """Handles SIGTERM: a checkpoint after the current step, then the end."""
        self.is_told_to_stop = True

    def say(self, event: str, **details: object) -> None:
        """Appends one event to the report, from the first rank only."""
        if RANK == 0:
            with self.report.open("a") as report:
                report.write(json.dumps({"event": event, **details}) + "\n")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Reports that steps begin."""
        self.say("start", step=state.global_step)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Starts the timer of a step."""
        self.begun_s = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Decides, with all ranks, whether to save and whether to stop."""
        self.step_s = time.perf_counter() - self.begun_s
        every_s, last_step = self.order["checkpoint_every_s"], self.order["last_step"]
        is_due = every_s is not None and time.monotonic() - self.saved_s >= every_s
        stop, save = self.agree(args.device, self.is_told_to_stop or state.global_step == last_step, is_due)
        control.should_training_stop |= stop
        control.should_save |= stop or save

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict | None = None,
        **_: object,
    ) -> None:
        """Reports a step with its loss: with `logging_steps=1`, it is called after every step."""
        if logs and "loss" in logs:
            self.say("step", step=state.global_step, seconds=self.step_s, loss=float(logs["loss"]))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Reports a checkpoint after every rank has written it: Ringmaster owns the folder from then on."""
        self.agree(args.device, True)
        self.saved_s = time.monotonic()
        self.say("checkpoint", step=state.global_step, folder=f"{args.output_dir}/checkpoint-{state.global_step}")

    def agree(self, device: torch.device, *asked: bool) -> list[bool]:
        """Returns for each request whether any rank makes it; waits for all ranks."""
        if NUM_RANKS == 1:
            return list(asked)
        votes = torch.tensor(asked, dtype=torch.int32, device=device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return [bool(vote) for vote in votes.tolist()]


def main() -> None:
    """Trains as the order specifies."""
    order = json.loads(Path(os.environ["RINGMASTER_ORDER"]).read_text())
    ringmaster = Ringmaster(order, Path(os.environ["RINGMASTER_REPORT"]))
    job, device = order["job"], order["devices"][RANK]
    if device["cores"]:
        os.sched_setaffinity(0, device["cores"])
    set_seed(job["seed"])
    rows = job["global_batch_size"] // NUM_RANKS
    arguments = TrainingArguments(
        output_dir=order["save_to"],
        max_steps=order["num_steps"] if order["mode"] == "run" else ENDLESS,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        learning_rate=job["optimizer"]["lr"],
        seed=job["seed"],
        logging_steps=1,
        save_strategy="no",  # the callback decides
        use_cpu=device["kind"] == "cpu",
        ddp_backend="gloo" if device["kind"] == "cpu" else "nccl",
        report_to=[],
        disable_tqdm=True,
    )
    kwargs = job["model"]["kwargs"]
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=kwargs["hidden_size"],
        intermediate_size=2 * kwargs["hidden_size"],
        num_hidden_layers=kwargs["num_layers"],
        num_attention_heads=2,
        use_cache=False,
    )
    from pydoc_data import topics

    text = "".join(topics.topics.values()).encode()
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=Text(text[: -len(text) // 50]),
        eval_dataset=Text(text[-len(text) // 50 :]),
        callbacks=[ringmaster],
    )
    trainer.train(resume_from_checkpoint=order["restore_from"])
    step = trainer.state.global_step
    if order["mode"] == "profile" or step == order["num_steps"]:
        ringmaster.say("metrics", step=step, metrics={"loss": trainer.evaluate()["eval_loss"]})
        if RANK == 0:
            trainer.accelerator.unwrap_model(trainer.model).save_pretrained(order["export_to"])
        ringmaster.say("model")
    if order["mode"] == "profile" or step == order["last_step"]:
        ringmaster.say("done", step=step)
    else:
        ringmaster.say("preempted", step=step)
        sys.exit(75)


main()
