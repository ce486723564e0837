"""Trainer, a few lines, as in the guide of transformers."""

import sys

from beside import llama, sentences
from transformers import Trainer, TrainingArguments, set_seed

set_seed(3)
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, max_steps=int(sys.argv[1]), learning_rate=1e-2, use_cpu=True, report_to=[]
)
trainer = Trainer(llama(), arguments, train_dataset=sentences(20))
trainer.train()
trainer.save_model("out/final")
