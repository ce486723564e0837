"""Writes small data for the recipes next to this file: `python examples/recipes/make_data.py`.

All of it comes from what is installed anyway: texts are the docstrings of Python's standard library, and images the
handwritten digits of scikit-learn. A tokenizer with a chat template is trained on the texts.
"""

import ast
import csv
import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

DATA = Path(__file__).parent / "data"
PACKAGES = ("asyncio", "email", "importlib", "multiprocessing", "unittest")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
NUM_IMAGES = 600


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function of the standard library: its package, its name, and the first sentence about it."""

    package: str
    name: str
    sentence: str

    @property
    def question(self) -> str:
        """What a user may ask about it."""
        return f"What does {self.name} of {self.package} do?"


def main() -> None:
    """Writes all files into the folder `data`."""
    DATA.mkdir(exist_ok=True)
    draw = random.Random(0)
    every = list(dict.fromkeys(functions(Path(sysconfig.get_path("stdlib")))))
    draw.shuffle(every)
    classified = [each for each in every if each.package in PACKAGES]
    with (DATA / "docstrings.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([each.sentence, each.package] for each in classified)
    asked = every[:1500]
    write_rows("conversations.jsonl", [{"messages": conversation(each)} for each in asked])
    write_rows("preferences.jsonl", pairs := preferences(asked, draw))
    write_rows("judged.jsonl", [judged(pair, is_right=place % 2 == 0) for place, pair in enumerate(pairs)])
    write_rows("pairs.jsonl", [{"anchor": words(each.name), "positive": each.sentence} for each in asked])
    write_rows("prompts.jsonl", [prompt(each, "ae"[place % 2]) for place, each in enumerate(asked)])
    save_tokenizer(every)
    save_images()
    print(f"{len(classified)} texts, {len(asked)} conversations, prompts and pairs, {NUM_IMAGES} images: {DATA}")


def functions(stdlib: Path) -> Iterator[Function]:
    """Yields the documented functions of the standard library's own packages."""
    for file in sorted(stdlib.rglob("*.py")):
        package = file.relative_to(stdlib).parts[0].removesuffix(".py")
        if package in ("site-packages", "dist-packages", "test", "idlelib", "lib2to3", "turtledemo"):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # files that Python's own tests need
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
                sentence = " ".join(text.split("\n\n")[0].split())
                if 20 <= len(sentence) <= 120 and len(set(sentence.split())) > 2 and not node.name.startswith("__"):
                    yield Function(package=package, name=node.name, sentence=sentence)


def conversation(asked: Function) -> list[dict[str, str]]:
    """Returns a question about a function, and the answer."""
    return [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": asked.question},
        {"role": "assistant", "content": asked.sentence},
    ]


def preferences(asked: list[Function], draw: random.Random) -> list[dict[str, object]]:
    """Returns questions with the right answer, which is chosen, and the same words in another order."""
    rows: list[dict[str, object]] = []
    for each in asked:
        *prompt, chosen = conversation(each)
        mixed = each.sentence.split()
        while " ".join(mixed) == each.sentence:
            draw.shuffle(mixed)
        rejected = {"role": "assistant", "content": " ".join(mixed)}
        rows.append({"prompt": prompt, "chosen": [chosen], "rejected": [rejected]})
    return rows


def judged(pair: dict[str, object], *, is_right: bool) -> dict[str, object]:
    """Returns the question of a pair with one of its answers, and whether it is the right one."""
    return {"prompt": pair["prompt"], "completion": pair["chosen" if is_right else "rejected"], "label": is_right}


def prompt(asked: Function, letter: str) -> dict[str, object]:
    """Returns a prompt that asks for a letter, which is a column for a reward function."""
    return {"prompt": f"Write {letter} for {words(asked.name)}: {letter}", "letter": letter}


def words(name: str) -> str:
    """Returns a function's name as words."""
    return name.strip("_").replace("_", " ")


def write_rows(name: str, rows: list[dict[str, object]]) -> None:
    """Writes rows as JSON lines."""
    (DATA / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def save_tokenizer(every: list[Function]) -> None:
    """Trains a tokenizer on all texts, and saves it with a chat template."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator((f"{each.question} {each.sentence}" for each in every), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|end|>", pad_token="<|pad|>", chat_template=CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(DATA / "tokenizer")


def save_images() -> None:
    """Saves images of digits in a folder for each digit."""
    digits = load_digits()
    for number, (pixels, digit) in enumerate(zip(digits.images[:NUM_IMAGES], digits.target, strict=False)):
        folder = DATA / "digits" / str(digit)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15.9).astype(np.uint8)).save(folder / f"{number}.png")


if __name__ == "__main__":
    main()
