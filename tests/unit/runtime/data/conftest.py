import json
import random

import pytest

WORDS = ["the", "model", "learns", "a", "token", "from", "each", "row", "of", "data", "and", "forgets", "none"]


@pytest.fixture
def text():
    """A function text(n) that returns n lines of made-up prose, the same in every run."""

    def write(num_lines: int, seed: int = 0) -> str:
        draw = random.Random(seed)
        return "".join(" ".join(draw.choices(WORDS, k=12)) + ".\n" for _ in range(num_lines))

    return write


@pytest.fixture
def jsonl(tmp_path, text):
    """A function jsonl(name, rows) that writes a file of rows. A whole number stands for that many rows of prose."""

    def write(name, rows):
        if isinstance(rows, int):
            rows = [{"text": text(3, seed)} for seed in range(rows)]
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    return write
