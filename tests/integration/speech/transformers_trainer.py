"""Speech models trained by transformers' own trainers, from the files alone."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import AutoFeatureExtractor, AutoTokenizer

from ringmaster.techniques.data import prepare
from ringmaster.techniques.data.samples import Sampler
from ringmaster.techniques.models.build import build_model
from tests.recordings import RATE, soundfile

NUM_STEPS, NUM_ROWS = 20, 4


def rows_of(table):
    """The samples and the text of each row of a table."""
    rows = map(json.loads, Path(table).read_text().splitlines())
    return [(soundfile.read(Path(table).parent / row["audio"], dtype="float32")[0], row["text"]) for row in rows]


class Collator:
    """Pads inputs and labels by their own lengths, as the collators of transformers' examples."""

    def __init__(self, folder, name):
        self.extractor, self.tokenizer = (
            each.from_pretrained(folder) for each in (AutoFeatureExtractor, AutoTokenizer)
        )
        self._name = name

    def __call__(self, rows):
        extract, tokenizer = self.extractor, self.tokenizer
        inputs = [{self._name: extract(audio, sampling_rate=RATE)[self._name][0]} for audio, _ in rows]
        batch = extract.pad(inputs, padding=True, return_tensors="pt")
        labels = tokenizer.pad([tokenizer(text) for _, text in rows], padding=True, return_tensors="pt")
        padded = labels.input_ids.masked_fill(labels.attention_mask.ne(1), -100)
        starts = tokenizer.convert_tokens_to_ids("<|startoftranscript|>") == padded[:, 0]
        batch["labels"] = padded[:, 1:] if bool(starts.all()) else padded
        return dict(batch)


@dataclass(frozen=True)
class TrainedByTransformers:
    losses: list[float]
    model: torch.nn.Module
    tokenizer: object
    predictions: torch.Tensor
    texts: list[str]

    @property
    def weights(self):
        return {name: value.detach() for name, value in self.model.state_dict().items()}


def trained_by_transformers(bench, job, folder, *, processor, lr, rows_predicted=1):
    """Trains a job by a Trainer on the same rows in the same order, and predicts the held-out rows.

    rows_predicted: at once; one, as transformers reads what is written in the padding of others.
    """
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    prepared = prepare(job.data, cache_dir=bench.cache_dir)
    sampler = Sampler(num_samples=prepared.num_samples, global_batch_size=NUM_ROWS, seed=job.seed)
    model = build_model(job.model, data=prepared, seed=job.seed)
    losses = []

    class Recording(Seq2SeqTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            if self.model.training:
                losses.append(float(loss.detach()))
            return loss

        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[job.optimizer.name]
    optimizer = kind(model.parameters(), lr=lr)
    generates = hasattr(model, "generate")
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder), max_steps=NUM_STEPS, per_device_train_batch_size=NUM_ROWS, max_grad_norm=0.0,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
        predict_with_generate=generates, per_device_eval_batch_size=rows_predicted, generation_max_length=20,
    )  # fmt: skip
    rows, collator = rows_of(job.data.path), Collator(processor, model.main_input_name)
    held_out = rows_of(job.data.held_out_path)
    trainer = Recording(
        model,
        arguments,
        data_collator=collator,
        train_dataset=[rows[i] for step in range(NUM_STEPS) for i in sampler.indices(step)],
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
    )
    trainer.train()
    predictions = trainer.predict(held_out).predictions
    return TrainedByTransformers(
        losses, model, collator.tokenizer, torch.as_tensor(predictions), [text for _, text in held_out]
    )


def error_rate(pairs):
    """The edits between written and true sequences, by the length of the true ones."""

    def edits(one, two):
        @cache
        def between(i, j):
            if not i or not j:
                return i + j
            same = between(i - 1, j - 1) + (one[i - 1] != two[j - 1])
            return min(same, between(i - 1, j) + 1, between(i, j - 1) + 1)

        return between(len(one), len(two))

    return sum(edits(own, true) for own, true in pairs) / sum(len(true) for _, true in pairs)
