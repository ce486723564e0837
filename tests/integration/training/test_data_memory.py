"""The memory that a preparation takes does not grow with the text."""

import json
import random
import subprocess
import sys

import pytest

MEGABYTE = 1_000_000
# Measured: 280 MB and, with the tokenizer of transformers, 530 MB; read whole, 50 MB of text took several GB.
MAX_BYTES = 800 * MEGABYTE

CHILD = """
import json, resource, sys
from pathlib import Path
from ringmaster.techniques.job_specs import (DataSpec)
from ringmaster.techniques.data import prepare
from ringmaster.techniques.data import prepare
said = json.loads(sys.argv[1])
prepared = prepare(DataSpec(seq_len=256, **said["spec"]), cache_dir=Path(said["cache"]))
peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"peak_bytes": peak_bytes, "tokenizer": str(prepared.tokenizer_dir)}))
"""


def in_child(folder, **spec):
    said = json.dumps({"spec": spec, "cache": str(folder / "cache")})
    ran = subprocess.run([sys.executable, "-c", CHILD, said], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(ran.stdout)


@pytest.mark.full
def test_fifty_megabytes_of_text_take_bounded_memory(tmp_path):
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu\u00e9", k=draw.randint(1, 9))) for _ in range(20_000)]
    block = "".join(" ".join(draw.choices(words, k=12)) + ".\n" for _ in range(20_000))
    with (tmp_path / "a.txt").open("w") as whole, (tmp_path / "b.jsonl").open("w") as rows:
        for number in range(50 * MEGABYTE // len(block) + 1):
            whole.write(block)
            for start in range(0, len(block), 10_000):
                rows.write(json.dumps({"text": f"{number} {block[start : start + 10_000]}"}) + "\n")
    trained = in_child(tmp_path, path=str(tmp_path / "a.txt"))
    given = [
        in_child(tmp_path, path=str(tmp_path / name), tokenizer=trained["tokenizer"], name="n", version="1")
        for name in ("a.txt", "b.jsonl")
    ]
    assert max(each["peak_bytes"] for each in (trained, *given)) < MAX_BYTES
