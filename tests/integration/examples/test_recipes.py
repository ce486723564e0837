"""The recipes of examples/recipes, from their data to exports that transformers and peft load."""

import csv
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from ringmaster.features.speech.audio import resampled
from ringmaster.tasks.batch import load_batch

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "examples" / "recipes"
SWEEP = "sweep"
NEEDS = {"fp8": "torchao", "speech": "soundfile", "quantization_aware": "torchao"}
NAMES = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(NEEDS.get(name, "yaml")) is None, reason=NEEDS.get(name, "")))
    for name in sorted(path.stem for path in RECIPES.glob("*.yaml") if not path.stem.startswith(SWEEP))
]
LORA = "with-lora"
pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


class Place:
    """A copy of the recipes with their data, and the home of their runs."""

    def __init__(self, folder):
        self.folder, self.data = folder / "recipes", folder / "recipes" / "data"
        shutil.copytree(RECIPES, self.folder, ignore=shutil.ignore_patterns("data"))
        self.environment = {**os.environ, "RINGMASTER_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT / "src")}
        self.make("make_data.py")

    def run(self, name):
        """Returns the jobs of a recipe's run by name: {"metrics", "model_dir", ...}."""
        said = json.loads(self.make("-m", "ringmaster.flows.entry", "run", f"{name}.yaml", "--json"))
        assert (said["status"], said["faults"]) == ("done", [])
        jobs = {job["name"]: job for job in said["jobs"]}
        assert {job["status"] for job in jobs.values()} == {"done"}
        return jobs

    def rows(self, name):
        return [json.loads(row) for row in (self.data / name).read_text().splitlines()]

    def make(self, *arguments):
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("place"))


@pytest.mark.parametrize("name", NAMES)
def test_recipes_are_right(place, name):
    assert load_batch(place.folder / f"{name}.yaml").jobs


def test_classify(place):
    from transformers import pipeline

    job = place.run("classify")["bert"]
    assert job["metrics"]["accuracy"] > 0.5  # 5 classes
    with (place.data / "docstrings.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))[:100]
    found = pipeline("text-classification", model=job["model_dir"])([row["text"] for row in rows], batch_size=10)
    assert share(each["label"] == row["label"] for each, row in zip(found, rows, strict=True)) > 0.5


def test_fp8(place):
    pytest.importorskip("torchao", reason="the extra torchao is not installed")
    assert place.run("fp8")["llama"]["metrics"]["loss"] < 6


def test_quantization_aware(place):
    pytest.importorskip("torchao", reason="the extra torchao is not installed")
    jobs = place.run("quantization_aware")
    assert jobs["converted"]["metrics"]["loss"] == pytest.approx(jobs["prepared"]["metrics"]["loss"], abs=1e-4)
    assert jobs["prepared"]["metrics"]["loss"] < jobs["llama"]["metrics"]["loss"] + 0.2


def test_speech(place):
    from transformers import pipeline

    soundfile = pytest.importorskip("soundfile", reason="the extra speech is not installed")
    job = place.run("speech")["letters"]
    assert job["metrics"]["character_error_rate"] < 0.3
    write = pipeline("automatic-speech-recognition", model=job["model_dir"])
    rows = place.rows("speech.jsonl")[:20]
    for row in rows:
        samples, rate = soundfile.read(place.data / row["audio"], dtype="float32")
        row["written"] = write({"raw": resampled(samples, rate, 16_000), "sampling_rate": 16_000})["text"]
    assert share(row["written"] == row["text"] for row in rows) > 0.5


def test_images(place):
    from transformers import pipeline

    job = place.run("images")["vit"]
    assert job["metrics"]["accuracy"] > 0.4  # 10 classes
    files = sorted((place.data / "digits").rglob("*.png"))[::10]
    found = pipeline("image-classification", model=job["model_dir"])([str(file) for file in files], top_k=1)
    assert share(each["label"] == file.parent.name for (each,), file in zip(found, files, strict=True)) > 0.4


def test_image_text(place):
    """The model says which digits it sees; the adapter of it is loaded by peft."""
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText, AutoProcessor

    jobs = place.run("image_text")
    assert jobs["seeing"]["metrics"]["accuracy"] > 0.85  # 0.73 by chance
    assert jobs["preferring"]["metrics"]["preference_accuracy"] > 0.7
    folder = jobs["seeing"]["model_dir"]
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    adapted = PeftModel.from_pretrained(
        AutoModelForImageTextToText.from_pretrained(folder), jobs["preferring"]["model_dir"]
    )
    for one in (model, adapted):
        rows = place.rows("seen.jsonl")[:40]
        assert share(digits_seen(one, processor, row, place.data) == true_digits(row) for row in rows) > 0.4


def digits_seen(model, processor, row, folder):
    question = row["messages"][0]
    parts = [
        {**each, "image": str(folder / each["image"])} if "image" in each else each for each in question["content"]
    ]
    inputs = processor.apply_chat_template(
        [{**question, "content": parts}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"add_special_tokens": False},
    )
    written = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return processor.decode(written, skip_special_tokens=False).partition("<end_of_utterance>")[0]


def true_digits(row):
    return row["messages"][1]["content"][0]["text"]


def test_instruct(place):
    from transformers import AutoModelForCausalLM

    job = place.run("instruct")["assistant"]
    assert job["metrics"]["accuracy"] > 0.1  # 2048 tokens
    model = AutoModelForCausalLM.from_pretrained(job["model_dir"])
    assert len(answer(model, job["model_dir"], question(place)).split()) > 1


def test_dpo(place):
    """The second job begins with the weights of the first; so does an adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    batch = yaml.safe_load((place.folder / "dpo.yaml").read_text())
    batch["jobs"].append({**batch["jobs"][1], "name": LORA, "adapter": {"kind": "lora", "rank": 8, "alpha": 16}})
    (place.folder / "dpo-lora.yaml").write_text(yaml.safe_dump(batch))
    jobs = place.run("dpo-lora")
    for name in ("preferring", LORA):
        assert jobs[name]["metrics"]["preference_accuracy"] > 0.7
    first, second = (
        AutoModelForCausalLM.from_pretrained(jobs[name]["model_dir"]) for name in ("instructed", "preferring")
    )
    pairs = place.rows("preferences.jsonl")[:50]
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(jobs["instructed"]["model_dir"]),
                                        jobs[LORA]["model_dir"])  # fmt: skip
    for model, name in ((second, "preferring"), (adapted.eval(), LORA)):
        folder = jobs[name]["model_dir"]
        assert share(gain(model, first, pair, folder) > 0 for pair in pairs) > 0.7
        assert answer(model, folder, question(place))


def test_embeddings(place):
    from transformers import AutoModel, AutoTokenizer

    job = place.run("embeddings")["encoder"]
    assert job["metrics"]["recall_at_5"] > 0.2  # 5 of 163 by chance
    model, tokenizer = (kind.from_pretrained(job["model_dir"]) for kind in (AutoModel, AutoTokenizer))
    pairs = place.rows("pairs.jsonl")[:100]
    anchors, positives = (embedded(model, tokenizer, [pair[key] for pair in pairs]) for key in ("anchor", "positive"))
    best = (anchors @ positives.T).topk(5).indices
    assert share(i in row for i, row in enumerate(best.tolist())) > 0.2


def test_sweep(place):
    """The best trial is loaded by peft, and has the loss that the sweep reports."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    place.make("make_base.py", "20")
    sweep = yaml.safe_load((place.folder / f"{SWEEP}.yaml").read_text())
    sweep["template"]["job"] |= {"num_steps": 12, "evaluation": {"metrics": ["loss"], "max_batches": 5}}
    sweep["template"]["job"]["schedule"]["warmup_steps"] = 2
    sweep["early_stopping"]["min_steps"] = 3
    sweep |= {"space": {"optimizer.lr": [1e-3, 1e-2], "adapter.rank": [4, 8]}, "num_trials": 4}
    (place.folder / "short.yaml").write_text(yaml.safe_dump(sweep))
    found = json.loads(place.make("-m", "ringmaster.flows.entry", "sweep", "short.yaml", "--json"))
    assert (found["status"], len(found["leaderboard"])) == ("done", 4)
    folder = next(job["model_dir"] for job in found["batch"]["jobs"] if job["name"] == found["best"]["job"])
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(place.data / "base"), folder).eval()
    rows = [row["messages"] for row in place.rows("questions-test.jsonl")[:20]]
    each = [log_p for said in rows for log_p in log_probabilities(model, said[:-1], said[-1:], folder)]
    assert -sum(each) / len(each) == pytest.approx(found["best"]["held-out loss"], rel=1e-4)


def test_grpo(place):
    """The model writes the letter that a prompt asks for more often than in the beginning, when the reward was 0.12."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    job = place.run("grpo")["letters"]
    assert job["metrics"]["reward"] > 0.2
    model, tokenizer = (kind.from_pretrained(job["model_dir"]) for kind in (AutoModelForCausalLM, AutoTokenizer))
    row = place.rows("prompts.jsonl")[0]
    given = tokenizer(row["prompt"], return_tensors="pt")
    tokens = model.generate(**given, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    assert tokenizer.decode(tokens[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


def test_kto(place):
    """What is learnt from single answers tells right ones from wrong ones."""
    jobs = place.run("kto")
    assert jobs["judging"]["metrics"]["preference_accuracy"] > 0.52


def test_reward_model(place):
    """The reward model prefers the right answer, also as transformers loads it, and rewards another model."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    jobs = place.run("reward_model")
    assert jobs["judge"]["metrics"]["reward_accuracy"] > 0.7
    folder = jobs["judge"]["model_dir"]
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = place.rows("preferences.jsonl")[:50]
    rewards = []
    for row in rows:
        for answer in ("chosen", "rejected"):
            text = tokenizer.apply_chat_template([*row["prompt"], *row[answer]], tokenize=False)
            with torch.no_grad():
                rewards.append(float(model(**tokenizer(text, return_tensors="pt")).logits))
    assert share(chosen > rejected for chosen, rejected in zip(rewards[::2], rewards[1::2], strict=True)) > 0.7
    assert jobs["rewarded"]["metrics"]["reward"] != 0


def test_on_policy_distillation(place):
    """The student comes nearer to its teacher, whose tokens it writes."""
    from transformers import AutoModelForCausalLM

    jobs = place.run("on_policy_distillation")
    assert jobs["student"]["metrics"]["loss"] < 0.8
    student = AutoModelForCausalLM.from_pretrained(jobs["student"]["model_dir"])
    assert answer(student, jobs["student"]["model_dir"], question(place))


def share(are):
    """The share of those that are true."""
    found = list(are)
    return sum(found) / len(found)


def question(place):
    """The messages before an answer."""
    return place.rows("conversations.jsonl")[0]["messages"][:-1]


def answer(model, folder, messages):
    """The text with which a model continues a conversation."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**given, max_new_tokens=20, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.decode(tokens[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


def gain(model, reference, pair, folder):
    """How much more than its reference a model prefers the chosen answer."""
    chosen, rejected = (
        log_probability(model, pair["prompt"], pair[key], folder)
        - log_probability(reference, pair["prompt"], pair[key], folder)
        for key in ("chosen", "rejected")
    )
    return chosen - rejected


def log_probability(model, prompt, said, folder):
    """The log-probability of an answer."""
    return sum(log_probabilities(model, prompt, said, folder))


def log_probabilities(model, prompt, said, folder):
    """The log-probability of each token of an answer."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    ids = torch.tensor([tokenizer.apply_chat_template(prompt + said, return_dict=True)["input_ids"]])
    with torch.no_grad():
        log_p = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    each = log_p.gather(-1, ids[0, 1:, None])[:, 0]
    return each[len(before) - 1 :].tolist()


def embedded(model, tokenizer, texts):
    """Normalised means of the last hidden states."""
    import torch

    given = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**given).last_hidden_state
    mask = given["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
