"""Trainer with evaluations and checkpoints of its own, the best of which is the model, in a folder that exists."""

import sys

from beside import llama, sentences
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments, set_seed

set_seed(4)
rows = sentences(28)
arguments = TrainingArguments(
    output_dir="best",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    num_train_epochs=int(sys.argv[1]) // 5,
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=1,
    save_only_model=True,
    load_best_model_at_end=True,
    use_cpu=True,
    report_to=[],
)
trainer = Trainer(
    llama(),
    arguments,
    train_dataset=rows[:20],
    eval_dataset=rows[20:],
    callbacks=[EarlyStoppingCallback(early_stopping_patience=50)],
)
trainer.train(resume_from_checkpoint=False)
print(trainer.evaluate())
