"""TRL's SFTTrainer with an adapter, as a user writes it."""

import sys

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

num_steps, base = int(sys.argv[1]), sys.argv[2]
set_seed(6)
texts = [
    f"the {animal} {verb} {number} times" for animal in ("cat", "dog") for verb in ("ran", "sat") for number in "12345"
]
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(base),
    processing_class=AutoTokenizer.from_pretrained(base),
    args=SFTConfig("sft", max_steps=num_steps, per_device_train_batch_size=4, use_cpu=True, bf16=False, report_to=[]),
    train_dataset=Dataset.from_dict({"text": texts}),
    peft_config=LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
)
trainer.train()
