"""Tiny jobs of every kind of data, whose samples differ in length and have uneven numbers of labels."""

import json
import random
from dataclasses import replace

import numpy as np
from PIL import Image

from ringmaster.techniques import DataSpec, EvaluationSpec, ModelSpec
from tests.integration.workbench import GPT2, LLAMA, SYLLABLES, VIT

NUM_ROWS, CLASSES = 48, ("bad", "good", "so so")
BERT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
MODELS = {
    "text-classification": ModelSpec(architecture="BertForSequenceClassification", config=BERT),
    "causal-classifier": replace(LLAMA, architecture="LlamaForSequenceClassification"),
    "token-classification": ModelSpec(architecture="BertForTokenClassification", config=BERT),
    "seq2seq": ModelSpec(architecture="T5ForConditionalGeneration", config=_T5),
    "chat": LLAMA,
    "completion": GPT2,
    "packed": LLAMA,
    "grouped": GPT2,
    "image-classification": VIT,
}
VARIANTS = {
    "packed": ("chat", {"packing": True, "seq_len": 192}),
    "grouped": ("completion", {"sampling": "length-grouped"}),
}


def words(draw, at_most):
    return " ".join(draw.choice(SYLLABLES) for _ in range(draw.randint(1, at_most)))


def row(kind, draw):
    """A made-up row; the longest of a kind is many times as long as the shortest."""
    if kind in ("text-classification", "causal-classifier"):
        return {"text": words(draw, 12), "label": draw.choice(CLASSES)}
    if kind == "token-classification":
        tokens = words(draw, 12).split()
        return {"tokens": tokens, "labels": [draw.choice(CLASSES) for _ in tokens]}
    if kind == "seq2seq":
        return {"input": words(draw, 12), "target": words(draw, 9)}
    if kind == "chat":
        turns = [
            [{"role": "user", "content": words(draw, 4)}, {"role": "assistant", "content": words(draw, 6)}]
            for _ in range(draw.randint(1, 3))
        ]
        return {"messages": [message for turn in turns for message in turn]}
    return {"prompt": words(draw, 9), "completion": " " + words(draw, 9)}


def spec_of(kind, folder):
    """The spec of made-up data, which is written into `folder` once."""
    kind, changes = VARIANTS.get(kind, (kind, {}))
    draw = random.Random(kind)
    if kind == "image-classification":
        for i in range(0 if (folder / "images").exists() else NUM_ROWS):
            of_class = folder / "images" / CLASSES[i % 3]
            of_class.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(i).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(of_class / f"{i}.png")
        return DataSpec(kind=kind, path=str(folder / "images" / "**" / "*.png"), kwargs={"image_size": 8}, held_out=0.3)
    file = folder / f"{kind}.jsonl"
    if not file.exists():  # otherwise its data would be prepared anew
        file.write_text("".join(json.dumps(row(kind, draw)) + "\n" for _ in range(NUM_ROWS)))
    name = "text-classification" if kind == "causal-classifier" else kind
    # A multiple of four, as sequences of this length must be divisible.
    plain = DataSpec(kind=name, path=str(file), seq_len=64, vocab_size=300, held_out=0.3)
    return replace(plain, **changes)


def job_of(bench, kind, folder, **changes):
    """A tiny job. The last batch of its evaluation is not full."""
    evaluation = EvaluationSpec(metrics=("loss", "accuracy"), max_batches=3)
    return replace(bench.job(MODELS[kind], data=spec_of(kind, folder), evaluation=evaluation), **changes)
