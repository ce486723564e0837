"""Pretrains the base of examples/recipes/sweep.yaml, and writes its data: `python examples/recipes/make_base.py`.

The base is a Llama of 1.3 million parameters in Hugging Face's format, trained for about a minute on the docstrings of
Python's standard library. Adapters of it learn to say in a sentence what a function does. The docstrings of the
functions that are asked about are not among those that the base has seen.
"""

import ast
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from make_data import DATA, conversation, functions, save_tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

NUM_STEPS, BATCH_SIZE, SEQ_LEN = 500, 8, 64
NUM_TRAINED, NUM_HELD_OUT = 3600, 200


def main(num_steps: int = NUM_STEPS) -> None:
    """Writes data/questions-train.jsonl, data/questions-test.jsonl and data/base."""
    DATA.mkdir(exist_ok=True)
    stdlib = Path(sysconfig.get_path("stdlib"))
    every = list({each.sentence: each for each in functions(stdlib)}.values())
    random.Random(0).shuffle(every)
    asked = every[: NUM_TRAINED + NUM_HELD_OUT]
    for name, part in (("train", asked[NUM_HELD_OUT:]), ("test", asked[:NUM_HELD_OUT])):
        rows = (json.dumps({"messages": conversation(each)[1:]}) + "\n" for each in part)
        (DATA / f"questions-{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    save_tokenizer(every)
    tokenizer = AutoTokenizer.from_pretrained(DATA / "tokenizer")
    seen = {" ".join(each.sentence.split()) for each in asked}
    texts = [text for text in docstrings(stdlib) if not any(part in seen for part in paragraphs(text))]
    tokens = [token for ids in tokenizer(texts).input_ids for token in [*ids, tokenizer.eos_token_id]]
    model = pretrained(torch.tensor(tokens), vocab_size=len(tokenizer), num_steps=num_steps)
    model.save_pretrained(DATA / "base")
    tokenizer.save_pretrained(DATA / "base")


def docstrings(stdlib: Path) -> Iterator[str]:
    """Yields the docstrings of the standard library's modules, classes and functions."""
    for file in sorted(stdlib.rglob("*.py")):
        if {"site-packages", "dist-packages", "test"} & set(file.relative_to(stdlib).parts):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # files that Python's own tests need
            continue
        for node in ast.walk(tree):
            is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if is_documented and (text := ast.get_docstring(node)):
                yield text


def paragraphs(text: str) -> Iterator[str]:
    """Yields the paragraphs of a text, each as one line."""
    yield from (" ".join(part.split()) for part in text.split("\n\n"))


def pretrained(tokens: torch.Tensor, *, vocab_size: int, num_steps: int) -> LlamaForCausalLM:
    """Returns a small Llama that was trained on a stream of tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_steps // 20, num_steps)
    for step in range(num_steps):
        starts = torch.randint(len(tokens) - SEQ_LEN, (BATCH_SIZE,))
        batch = torch.stack([tokens[start : start + SEQ_LEN] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1} of {num_steps}: loss {loss.item():.2f}", flush=True)
    return model


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
