"""Speech models trained by transformers' own trainers, from the files alone."""

import json
from pathlib import Path

import torch

from ringmaster.techniques.data import prepare
from ringmaster.techniques.data.samples import Sampler
from ringmaster.techniques.models.build import build_model
from tests.recordings import RATE, soundfile

NUM_STEPS, NUM_ROWS = 20, 4


def rows_of(table):
    """The samples and the text of each row of a table."""
    rows = map(json.loads, Path(table).read_text().splitlines())
    return [(soundfile.read(Path(table).parent / row["audio"], dtype="float32")[0], row["text"]) for row in rows]


class CtcCollator:
    """Pads samples and labels by their own lengths, as the collator of transformers' examples."""

    def __init__(self, processor, table):
        from transformers import Wav2Vec2Processor

        self._processor, self._rows = Wav2Vec2Processor.from_pretrained(processor), rows_of(table)

    def __call__(self, places):
        rows = [self._rows[place] for place in places]
        extract, tokenizer = self._processor.feature_extractor, self._processor.tokenizer
        inputs = [{"input_values": extract(audio, sampling_rate=RATE).input_values[0]} for audio, _ in rows]
        batch = extract.pad(inputs, padding=True, return_tensors="pt")
        labels = tokenizer.pad([tokenizer(text) for _, text in rows], padding=True, return_tensors="pt")
        batch["labels"] = labels.input_ids.masked_fill(labels.attention_mask.ne(1), -100)
        return dict(batch)


def trained_by_transformers(bench, job, folder, *, processor, lr, collator=CtcCollator):
    """Returns the losses and the weights of a job that a Trainer trains on the same rows in the same order."""
    from transformers import Trainer, TrainingArguments

    prepared = prepare(job.data, cache_dir=bench.cache_dir)
    sampler = Sampler(num_samples=prepared.num_samples, global_batch_size=NUM_ROWS, seed=job.seed)
    model = build_model(job.model, data=prepared, seed=job.seed)
    losses = []

    class Recording(Trainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss.detach()))
            return loss

        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[job.optimizer.name]
    optimizer = kind(model.parameters(), lr=lr)
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=NUM_STEPS, per_device_train_batch_size=NUM_ROWS, max_grad_norm=0.0,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    Recording(
        model,
        arguments,
        data_collator=collator(processor, job.data.path),
        train_dataset=[int(i) for step in range(NUM_STEPS) for i in sampler.indices(step)],
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
    ).train()
    return losses, {name: value.detach() for name, value in model.state_dict().items()}
