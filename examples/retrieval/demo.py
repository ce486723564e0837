"""Trains a retriever, a scorer and readers of drawn facts, changes facts in their store, and asks again.

    make demo-retrieval          or          .venv/bin/python examples/retrieval/demo.py

The facts that are asked about are in the store alone: no model has been trained on them. The demo has a home of its own
and uses the `ringmaster` command line, and Python to count which passages are found and which answers a scorer picks.
The exit code is 1 where an answer is not the expected one.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast

from ringmaster.features.stores.knowledge_store import KnowledgeStore

HOME = Path(os.environ.get("RINGMASTER_DEMO_HOME", ".ringmaster/demo-retrieval")).resolve()
STARTS, ENDS = ("an", "bo", "ce", "da", "el", "fi", "go", "hu"), ("na", "ri", "ko", "la")
STEMS, SUFFIXES = ("mar", "nor", "pel", "qui", "ros", "sol", "tam", "ver"), ("berg", "dal", "ing")
FIRST = [start + end for start in STARTS for end in ENDS]
LAST = [stem + suffix for stem in STEMS for suffix in SUFFIXES]
KINDS = ("color", "town", "animal", "drink")
VALUES = {kind: [f"{kind}{number}" for number in range(16)] for kind in KINDS}
NUM_ASKED, NUM_CHANGED = 200, 100

BATCH = """\
name: facts
jobs:
  - &encoder
    name: encoder
    model:
      architecture: BertModel
      config: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 1, num_attention_heads: 4}
    data: {kind: embedding, path: pairs.jsonl, tokenizer: ./tokenizer}
    loss: contrastive
    optimizer: {name: adamw, lr: 0.002}
    global_batch_size: 32
    num_steps: 200
    evaluation: {metrics: [recall_at_1]}
  - <<: *encoder
    name: colbert
    loss: {name: late-interaction, temperature: 0.2}
    num_steps: 100
    evaluation: {metrics: [loss]}
  - name: wiki
    kind: store
    base: encoder
    model: {architecture: BertModel}
    data: {path: facts.jsonl, tokenizer: ./tokenizer}
  - &reader
    name: with-store
    model:
      architecture: LlamaForCausalLM
      config: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4}
    data: &questions
      kind: completion
      path: questions.jsonl
      tokenizer: ./tokenizer
      seq_len: 32
      retriever: &read {store: wiki, k: 1, template: "{passages} . {prompt}"}
    optimizer: {name: adamw, lr: 0.003}
    global_batch_size: 32
    num_steps: 550
    evaluation: {metrics: [exact_match]}
  - <<: *reader
    name: without
    data: {kind: completion, path: questions.jsonl, tokenizer: ./tokenizer, seq_len: 32}
  - <<: *reader
    name: rag
    loss: {name: rag-sequence, num_passages: 2}
    data: {<<: *questions, kind: rag, retriever: {<<: *read, k: 2}}
    evaluation: {metrics: [loss]}
"""

failures: list[str] = []


def main() -> int:
    """Runs all chapters; returns the exit code."""
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(parents=True)
    facts = draw_facts()
    names = sorted({name for name, _ in facts})
    asked = {key: value for key, value in facts.items() if key[0] in names[: NUM_ASKED // len(KINDS)]}
    trained = {key: value for key, value in facts.items() if key not in asked}
    save_tokenizer()
    write("facts.jsonl", passages(facts))
    write("pairs.jsonl", ({"anchor": question(*key), "positive": fact(*key, trained[key])} for key in trained))
    write("questions.jsonl", rows(trained))
    write("asked.jsonl", rows(asked))

    say("One batch: a dense retriever encodes a store, which a reader and a RAG-Sequence generator read, and ColBERT.")
    (HOME / "facts.yaml").write_text(BATCH)
    ringmaster("run", "facts.yaml")

    say("They are asked about facts that no model was trained on, and that the store holds.")
    alone = answered("facts.without", "asked.jsonl", None)
    for name in ("facts.with-store", "facts.rag"):
        reading = answered(name, "asked.jsonl", "facts.wiki/1")
        print(f"right answers: {reading:.1%} of {name}, {alone:.1%} without the store", file=sys.stderr)
        expect(reading >= alone + 0.3, f"the store is worth 30 points to {name}")

    ask_scorer(asked)

    say(f"{NUM_CHANGED} of these facts change: a new version of the store is recorded, and no model is trained.")
    changed = dict(random.Random(2).sample(sorted(asked.items()), NUM_CHANGED))
    changed = {(name, kind): other(kind, value) for (name, kind), value in changed.items()}
    write("changes.jsonl", passages(changed))
    before = weights()
    ringmaster("store", "update", "facts.wiki/1", "--data", "changes.jsonl")
    first = first_passages("facts.wiki/2", [question(*key) for key in changed])
    pairs = zip(changed.items(), first, strict=True)
    found = {key: value for (key, value), passage in pairs if passage == fact(*key, value)}
    write("changed.jsonl", rows(found))
    print(f"the passage of {len(found)} of {len(changed)} questions is found", file=sys.stderr)
    old, new = (answered("facts.with-store", "changed.jsonl", f"facts.wiki/{version}") for version in (1, 2))
    print(f"new answers: {old:.1%} from version 1 of the store, {new:.1%} from version 2", file=sys.stderr)
    expect(new >= 0.95, "changed facts are answered from the new passages")
    expect(old <= 0.1, "the old version of the store knows nothing of the changes")
    expect(weights() == before, "the weights are the same")

    say("What has read a passage?")
    name, kind = next(iter(changed))
    impact = json.loads(ringmaster("lineage", "impact", f"{kind} of {name}", "--json"))
    expect("facts.with-store/1" in {each["label"] for each in impact["models"]}, "the lineage names the reader")
    for failure in failures:
        print(f"NOT AS EXPECTED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def ask_scorer(asked: Mapping[tuple[str, str], str]) -> None:
    """Runs the chapter of the model of late interaction."""
    say("ColBERT picks the answer of the best of all passages, or without a store the best of all answers.")
    questions, right = [question(*key) for key in asked], [fact(*key, value) for key, value in asked.items()]
    store = [each.text for each in KnowledgeStore.open(restored("facts.wiki/1")).passages]
    answers = [[fact(name, kind, value) for value in VALUES[kind]] for name, kind in asked]
    scorer = restored("facts.colbert")
    reading = share(picked(scorer, questions, [store] * len(questions)), right)
    alone = share(picked(scorer, questions, answers), right)
    print(f"right answers: {reading:.1%} of facts.colbert, {alone:.1%} without the store", file=sys.stderr)
    expect(reading >= alone + 0.3, "the store is worth 30 points to facts.colbert")
    pairs = zip(questions, right, strict=True)
    write("asked-pairs.jsonl", ({"anchor": text, "positive": passage} for text, passage in pairs))
    data = {"kind": "embedding", "path": "asked-pairs.jsonl", "retriever": {"store": "facts.wiki/1", "k": 8}}
    hits = measured("facts.colbert", data, "hit_at_1")
    print(f"the right passage is ranked before 8 that are retrieved in {hits:.1%}", file=sys.stderr)
    expect(hits >= 0.95, "the scorer ranks the right passage before others that the dense retriever finds")


def draw_facts() -> dict[tuple[str, str], str]:
    """Returns the value of each kind for each person, the same every time."""
    draw = random.Random(0)
    names = draw.sample([f"{first} {last}" for first in FIRST for last in LAST], 400)
    return {(name, kind): draw.choice(VALUES[kind]) for name in names for kind in KINDS}


def fact(name: str, kind: str, value: str) -> str:
    """Returns a passage."""
    return f"the {kind} of {name} is {value}"


def question(name: str, kind: str) -> str:
    """Returns the question that a fact answers."""
    return f"what {kind} has {name} ?"


def other(kind: str, value: str) -> str:
    """Returns another value of a kind."""
    return VALUES[kind][(VALUES[kind].index(value) + 5) % len(VALUES[kind])]


def passages(facts: Mapping[tuple[str, str], str]) -> Iterable[dict[str, str]]:
    """Yields the passages of a store, named by what they are about."""
    for (name, kind), value in facts.items():
        yield {"id": f"{kind} of {name}", "text": fact(name, kind, value)}


def rows(facts: Mapping[tuple[str, str], str]) -> Iterable[dict[str, str]]:
    """Yields questions with their answers."""
    for (name, kind), value in facts.items():
        yield {"prompt": question(name, kind), "completion": f" {value}"}


def save_tokenizer() -> None:
    """Writes a tokenizer of the words that there are."""
    values = [value for each in VALUES.values() for value in each]
    words = ["the", "of", "is", "what", "has", "?", ".", *KINDS, *FIRST, *LAST, *values]
    ids = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[END]", *words])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[END]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(HOME / "tokenizer")


def restored(model: str) -> Path:
    """Returns a folder with the files of a model or a store."""
    folder = HOME / "restored"
    shutil.rmtree(folder, ignore_errors=True)
    ringmaster("lineage", "restore", model, str(folder))
    return folder


def first_passages(store: str, questions: Sequence[str]) -> list[str]:
    """Returns the text that a version of the store finds first for each question."""
    found = KnowledgeStore.open(restored(store)).search_texts(texts=questions, num_passages=1)
    return [passages[0].text for passages in found]


@torch.no_grad()
def picked(model: Path, questions: Sequence[str], candidates: Sequence[Sequence[str]]) -> list[str]:
    """Returns the candidate of each question that is most similar to it by late interaction (docs/losses.md)."""
    encoder, tokenizer = AutoModel.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    places = {text: place for place, text in enumerate(dict.fromkeys(chain(questions, *candidates)))}
    batch = tokenizer([*places], padding=True, return_tensors="pt", return_token_type_ids=False)
    vectors, is_token = normalize(encoder(**batch).last_hidden_state, dim=-1), batch["attention_mask"].bool()
    result = []
    for text, texts in zip(questions, candidates, strict=True):
        own, rows = places[text], [places[each] for each in texts]
        cosines = torch.einsum("td,nsd->nts", vectors[own][is_token[own]], vectors[rows])
        similarities = cosines.masked_fill(~is_token[rows, None], -torch.inf).amax(-1).sum(-1)
        result.append(texts[int(similarities.argmax())])
    return result


def share(given: Sequence[str], right: Sequence[str]) -> float:
    """Returns the share of answers that are right."""
    return sum(one == other for one, other in zip(given, right, strict=True)) / len(right)


def write(name: str, values: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows into a file of the demo's home."""
    (HOME / name).write_text("".join(json.dumps(each) + "\n" for each in values), encoding="utf-8")


def answered(model: str, file: str, store: str | None) -> float:
    """Returns the share of the questions in a file that a model answers."""
    data: dict[str, Any] = {"kind": "completion", "path": file, "tokenizer": "./tokenizer", "seq_len": 32}
    if store is None:
        return measured(model, data, "exact_match")
    data["retriever"] = {"store": "facts.wiki/1", "k": 1, "template": "{passages} . {prompt}"}
    return measured(model, data, "exact_match", "--store", store)


def measured(model: str, data: Mapping[str, Any], metric: str, *options: str) -> float:
    """Returns a metric of a model on all rows of some data."""
    asked = ["--data", json.dumps(data), "--metric", metric, "--all-rows", "--json", *options]
    seen = json.loads(ringmaster("evaluate", model, *asked))
    return next(float(each["value"]) for each in seen["metrics"] if each["metric"] == metric)


def weights() -> str:
    """Returns a hash of the weights of the reader with the store."""
    return hashlib.sha256((restored("facts.with-store") / "model.safetensors").read_bytes()).hexdigest()


def ringmaster(*arguments: str) -> str:
    """Runs a command in the demo's home; returns its result."""
    print(f"\n$ ringmaster {' '.join(arguments)}", file=sys.stderr)
    command = [str(Path(sys.executable).with_name("ringmaster")), *arguments]
    environment = {**os.environ, "RINGMASTER_HOME": str(HOME)}
    done = subprocess.run(command, cwd=HOME, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def say(text: str) -> None:
    """Prints the title of a chapter."""
    print(f"\n== {text}", file=sys.stderr)


def expect(is_so: bool, what: str) -> None:
    """Notes an answer that is not the expected one."""
    if not is_so:
        failures.append(what)


if __name__ == "__main__":
    sys.exit(main())
