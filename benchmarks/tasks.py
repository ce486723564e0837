"""Fine-tuning compared with Hugging Face's Trainer and TRL: the same weights, rows and steps, in alternation.

    python -m benchmarks.tasks [--rounds 5] [--steps 20]

Both contenders train in one process with the same threads: dropout 0, fp32, fused AdamW, the rows of each step in the
same order. The losses of the first steps are compared, and then the medians of whole steps (data, forward, backward,
clipping, update) within each round. The data is that of examples/recipes. Writes benchmarks/results/tasks.json and the
section of docs/benchmarks.md between the markers `<!-- tasks -->`. Where other programs are busy, two threads wait for
each other: pin it to one core (`taskset -c 0`).
"""

import argparse
import copy
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.page import write_section
from benchmarks.trainers import ROOT, Ours, settings, stamped, stopwatch

RESULTS = ROOT / "benchmarks" / "results" / "tasks.json"
NUM_WARM_UP = 2  # steps of a round that are not counted
BATCH_SIZE, TEMPERATURE, BETA = 16, 0.05, 0.1
SIZE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 2}
GOAL = 1e-4


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of each contender a round")
    parser.add_argument("--only", choices=[task.name for task in TASKS], help="one task, which is printed alone")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder))
        for task in TASKS:
            if arguments.only in (None, task.name):
                rows.append(compare(task, data, num_rounds=arguments.rounds, num_steps=arguments.steps))
                print(line(rows[-1]), flush=True)
    if arguments.only is None:
        record(rows)


def make_data(folder):
    """Writes the data of the recipes."""
    script = shutil.copy(ROOT / "examples" / "recipes" / "make_data.py", folder)
    subprocess.run([sys.executable, script], check=True, stdout=subprocess.DEVNULL)
    return folder / "data"


def compare(task, data, *, num_rounds, num_steps):
    """Compares one task: the losses of the first steps, and ratios of medians, one for each round."""
    folder = data.parent / task.name
    folder.mkdir()
    job = task.job(data)
    ours, theirs = Ours(job, folder), task(job, folder)
    losses = [report.loss for report in ours.reports(num_steps)], theirs.train(0, num_steps)[0]
    rounds, first = [], num_steps
    for _ in range(num_rounds):
        ours_s = [report.seconds for report in ours.reports(num_steps)][NUM_WARM_UP:]
        _, theirs_s = theirs.train(first, num_steps)
        rounds.append({"ours_s": statistics.median(ours_s), "theirs_s": statistics.median(theirs_s[NUM_WARM_UP - 1 :])})
        first += num_steps
    return {
        "name": task.name,
        "trainer": task.trainer_name,
        "num_parameters": sum(parameter.numel() for parameter in theirs.model.parameters()),
        "loss_difference": max(abs(a - b) for a, b in zip(*losses, strict=True)),
        "losses": [losses[0][0], losses[0][-1]],
        "ours_s": statistics.median(each["ours_s"] for each in rounds),
        "theirs_s": statistics.median(each["theirs_s"] for each in rounds),
        "ratios": sorted(each["theirs_s"] / each["ours_s"] for each in rounds),
    }


def job_of(model, *, data, **changes):
    """Returns a job whose held-out share is 0, so that the rows of its data are those of the file."""
    from ringmaster.techniques import DataSpec, Job, ModelSpec, OptimizerSpec

    kept = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if model.startswith("Bert") else {}
    return Job(
        name="job",
        model=ModelSpec(architecture=model, config={**SIZE, **kept}),
        data=DataSpec(held_out=0.0, **data),
        optimizer=OptimizerSpec(name="adamw", lr=3e-4, options={"weight_decay": 0.0}),
        clip_grad_norm=1.0,
        global_batch_size=BATCH_SIZE,
        num_steps=100_000,
        **changes,
    )


class Task:
    """A task under another trainer, from the weights and with the rows of the job."""

    def __init__(self, job, folder):
        from transformers import AutoTokenizer

        from ringmaster.techniques.data import open_data, prepare
        from ringmaster.techniques.models.build import build_model

        prepared = prepare(job.data, cache_dir=folder)
        self.samples, _ = open_data(job.data, cache_dir=folder, prepared=prepared)
        self.model = build_model(job.model, data=prepared, seed=job.seed)
        self.tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_dir)
        self.job, self.folder = job, folder

    def train(self, first, num):
        """Trains the job's steps from `first` on; returns the loss of each, and the seconds between their ends."""
        from datasets import Dataset
        from torch.utils.data import SequentialSampler

        from ringmaster.techniques.data.samples import Sampler

        size, seed = self.job.global_batch_size, self.job.seed
        sampler = Sampler(num_samples=len(self.samples), global_batch_size=size, seed=seed)
        steps = map(sampler.indices, range(first, first + num))
        rows = Dataset.from_list([self.row(int(index)) for step in steps for index in step])
        kind, arguments, more = self.trainer(settings(self.job, self.folder, num))

        class Recording(kind):
            def compute_loss(self, *args, **kwargs):
                loss = super().compute_loss(*args, **kwargs)
                losses.append(loss.detach())
                return loss

            def _get_train_sampler(self, *_):
                return SequentialSampler(self.train_dataset)

        losses, clock = [], stopwatch()
        Recording(model=self.model, args=arguments, train_dataset=rows, callbacks=[clock], **more).train()
        return [float(loss) for loss in losses], clock.seconds()

    def tokens(self, index, name="input_ids"):
        """Returns a sample's tokens without padding, or its labels."""
        sample = self.samples[index]
        kept = sample["input_ids"] != self.tokenizer.pad_token_id
        return sample[name][kept].tolist()


class Classification(Task):
    """Texts with DataCollatorWithPadding."""

    name, trainer_name = "text classification", "Trainer"

    @staticmethod
    def job(data):
        return job_of(
            "BertForSequenceClassification", data={"path": str(data / "docstrings.csv"), "kind": "text-classification"}
        )

    def row(self, index):
        return {"input_ids": self.tokens(index), "label": int(self.samples[index]["labels"])}

    def trainer(self, given):
        from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

        return Trainer, TrainingArguments(**given), {"data_collator": DataCollatorWithPadding(self.tokenizer)}


class Conversations(Task):
    """Conversations with labels for the assistant's tokens, which TRL takes as they are."""

    name, trainer_name = "conversations", "TRL SFTTrainer"

    @staticmethod
    def job(data):
        read = {"path": str(data / "conversations.jsonl"), "kind": "chat", "tokenizer": str(data / "tokenizer")}
        return job_of("LlamaForCausalLM", data=read)

    def row(self, index):
        return {"input_ids": self.tokens(index), "labels": self.tokens(index, "labels")}

    def trainer(self, given):
        from trl import SFTConfig, SFTTrainer

        arguments = SFTConfig(**given, bf16=False, gradient_checkpointing=False, max_length=None)
        return SFTTrainer, arguments, {"processing_class": self.tokenizer}


class Preferences(Task):
    """Pairs of answers, which TRL encodes itself."""

    name, trainer_name = "preferences", "TRL DPOTrainer"

    @staticmethod
    def job(data):
        read = {"path": str(data / "preferences.jsonl"), "kind": "preference", "tokenizer": str(data / "tokenizer")}
        return job_of("LlamaForCausalLM", data=read, loss="dpo", loss_options={"beta": BETA})

    def __init__(self, job, folder):
        super().__init__(job, folder)
        self.reference = copy.deepcopy(self.model)
        self.rows = [json.loads(row) for row in Path(job.data.path).read_text().splitlines()]

    def row(self, index):
        return self.rows[index]

    def trainer(self, given):
        from trl import DPOConfig, DPOTrainer

        arguments = DPOConfig(**given, bf16=False, gradient_checkpointing=False, max_length=None, beta=BETA)
        return DPOTrainer, arguments, {"ref_model": self.reference, "processing_class": self.tokenizer}


TASKS = (Classification, Conversations, Preferences)


def line(row):
    least, middle, most = row["ratios"][0], statistics.median(row["ratios"]), row["ratios"][-1]
    return (
        f"| {row['name']} | {row['trainer']} | {row['num_parameters'] / 1e6:.1f} M | {row['loss_difference']:.0e} | "
        f"{1e3 * row['ours_s']:.0f} ms | {1e3 * row['theirs_s']:.0f} ms | {middle:.2f} | {least:.2f} to {most:.2f} |"
    )


def record(rows):
    """Writes the figures, and the section of the page between the markers."""
    said = stamped(rows)
    RESULTS.write_text(json.dumps(said, indent=1) + "\n")
    cores = "one core" if said["cores"] == 1 else f"{said['cores']} cores"
    table = [
        f"`single` against other trainers, {said['date']}, {cores}: the same weights and rows, fp32, fused AdamW,",
        f"no dropout, {BATCH_SIZE} rows a step, in alternation in one process. *Losses*: the largest difference in the",
        f"first steps (goal {GOAL:.0e}). Times are medians of whole steps; above 1, ours is quicker (goal 1.0).",
        "",
        "| task | trainer | parameters | losses | ours | theirs | theirs / ours | over the rounds |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *map(line, rows),
    ]
    write_section("tasks", table)


if __name__ == "__main__":
    main()
