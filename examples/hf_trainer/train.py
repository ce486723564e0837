"""Hugging Face's Trainer: a small Llama that learns the bytes of Python's own help. Nothing in it is Ringmaster's.

ringmaster adopt examples/hf_trainer/train.py -- --hidden-size 64
"""

import argparse
from pydoc_data import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

SEQ_LEN = 64


class Text(torch.utils.data.Dataset):
    """Bytes as tokens: sample i is [SEQ_LEN] from i * SEQ_LEN on."""

    def __init__(self, text: bytes) -> None:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.samples = tokens[: len(tokens) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.samples[index], "labels": self.samples[index]}


def main() -> None:
    """Trains and evaluates the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", default="out")
    options = parser.parse_args()
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.hidden_size,
        intermediate_size=2 * options.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
    )
    text = "".join(topics.topics.values()).encode()
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            options.output,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            save_strategy="no",
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Text(text[: -len(text) // 50]),
        eval_dataset=Text(text[-len(text) // 50 :]),
    )
    trainer.train()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
