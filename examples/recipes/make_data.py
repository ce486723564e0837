"""Writes small data for the recipes next to this file: `python examples/recipes/make_data.py`.

All of it comes from what is installed anyway: texts are the docstrings of Python's standard library, images the
handwritten digits of scikit-learn, and recordings tones, one for each letter of a name. A tokenizer with a chat
template is trained on the texts.
"""

import ast
import csv
import json
import random
import sysconfig
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

DATA = Path(__file__).parent / "data"
PACKAGES = ("asyncio", "email", "importlib", "multiprocessing", "unittest")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL_TOKENS = ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
NUM_IMAGES = 600
NUM_RECORDINGS, RATE, LETTER_S = 600, 8_000, 0.04
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
IMAGE_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}:"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<end_of_utterance>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


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
    save_recordings([words(each.name) for each in every])
    save_processor()
    write_rows("seen.jsonl", seen := [seen_digits(number) for number in range(NUM_IMAGES)])
    write_rows("compared.jsonl", [compared_answers(row, place) for place, row in enumerate(seen)])
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


def save_recordings(texts: list[str]) -> None:
    """Saves recordings of short texts of letters, a table with their names, and the processor of a CTC model."""
    (DATA / "speech").mkdir(exist_ok=True)
    short = [text for text in dict.fromkeys(texts) if 3 <= len(text) <= 16 and {*text} <= {*LETTERS, " "}]
    rows: list[dict[str, object]] = []
    for number, text in enumerate(short[:NUM_RECORDINGS]):
        with wave.open(str(DATA / "speech" / f"{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes((tones(text) * 32_000).astype("<i2").tobytes())
        rows.append({"audio": f"speech/{number}.wav", "text": text})
    write_rows("speech.jsonl", rows)
    folder = DATA / "speech-processor"
    folder.mkdir(exist_ok=True)
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<unk>", "|", *LETTERS])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    tokenizer = Wav2Vec2CTCTokenizer(str(folder / "vocab.json"), pad_token="<pad>", bos_token=None, eos_token=None)
    tokenizer.save_pretrained(folder)
    Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(folder)


def tones(text: str) -> np.ndarray:
    """Returns the samples of a text: a tone for each letter, and silence for a blank."""
    times = np.arange(int(LETTER_S * RATE)) / RATE
    pitches = [200 + 110 * LETTERS.find(letter) for letter in text]
    return np.concatenate([0.5 * np.sin(2 * np.pi * pitch * times) * (pitch >= 200) for pitch in pitches])


def save_processor() -> None:
    """Saves a processor of images and texts as that of SmolVLM, for images of one tile of four tokens."""
    inner = Tokenizer(models.BPE(vocab={each: place for place, each in enumerate(sorted(ALPHABET))}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|im_start|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|end|>", pad_token="<|pad|>", additional_special_tokens=special
    )
    size = {"longest_edge": 16}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=IMAGE_TEMPLATE)
    processor.save_pretrained(DATA / "processor")


def seen_digits(number: int) -> dict[str, object]:
    """Returns a conversation about one or two images of digits."""
    digits = load_digits().target
    shown = [number, (number + 7) % NUM_IMAGES][: 1 + number % 2]
    images = [{"type": "image", "image": f"digits/{digits[each]}/{each}.png"} for each in shown]
    answer = " and ".join(str(digits[each]) for each in shown)
    return {
        "messages": [
            {"role": "user", "content": [*images, {"type": "text", "text": "Which digits?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
    }


def compared_answers(row: Any, place: int) -> dict[str, object]:
    """Returns the question of a conversation about images, with its answer and a wrong one."""
    question, answer = row["messages"]
    right = answer["content"][0]["text"]
    wrong = " and ".join(str((int(digit) + 1 + place % 9) % 10) for digit in right.split(" and "))
    return {"prompt": [question], "chosen": right, "rejected": wrong}


if __name__ == "__main__":
    main()
