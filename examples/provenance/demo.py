"""Makes models again from their lineage, finds a changed row, and undoes a row.

    make demo-reproduce          or          .venv/bin/python examples/provenance/demo.py reproduce
    make demo-undo               or          .venv/bin/python examples/provenance/demo.py undo

The demo trains two models in a home of its own, and then uses the `ringmaster` command line only. The exit code is 1
where an answer is not the expected one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HOME = Path(os.environ.get("RINGMASTER_DEMO_HOME", ".ringmaster/demo-reproduce")).resolve()
BATCH = """\
name: provenance
keep_checkpoints: 50
datasets: {rows: {path: rows.jsonl}}
jobs:
  - name: base
    model: &model
      architecture: LlamaForCausalLM
      config: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4}
    data: &data {name: rows, seq_len: 32, vocab_size: 400}
    optimizer: {name: adamw, lr: 0.003}
    global_batch_size: 8
    num_steps: 60
  - name: tuned
    base: base
    model: *model
    data: *data
    adapter: {kind: lora, rank: 4, dropout: 0.1}
    global_batch_size: 8
    num_steps: 40
"""
WORDS = ("the", "night", "train", "model", "plan", "gang", "rank", "step", "loss", "state")

LATE_ROW = 34  # which step reads first after some checkpoints

failures: list[str] = []


def main() -> int:
    """Runs the requested chapters; returns the exit code."""
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(parents=True)
    (HOME / "batch.yaml").write_text(BATCH)
    write_rows()
    say("Two models are trained: a base, and an adapter of it.")
    ringmaster("run", "batch.yaml", "--checkpoint-every", "0.1")
    {"reproduce": reproduce, "undo": undo}[sys.argv[1] if len(sys.argv) > 1 else "reproduce"]()
    for failure in failures:
        print(f"NOT AS EXPECTED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def reproduce() -> None:
    """Makes both models again, before and after a row was changed."""
    say("Each is made again from its lineage: the same bits, and a certificate on its page.")
    for model in ("provenance.base", "provenance.tuned"):
        report = reproduced(model)
        expect(report["is_equal"], f"{model} is equal")

    say("A word of one row is changed.")
    write_rows(changed=17)
    report = reproduced("provenance.base")
    expect(not report["is_equal"], "the changed row makes another model")
    expect(any("the data has changed" in cause for cause in report["causes"]), "the cause is the data")
    expect(report["first_step"] is not None, "the first step that differs is named")

    say("The row is brought back, and everything is equal again.")
    write_rows()
    expect(reproduced("provenance.base")["is_equal"], "the base is equal again")


def undo() -> None:
    """Trains both models again as if a row had never been, and makes the new base again from its lineage."""
    ringmaster("promote", "provenance.base/1", "--why", "the first one")
    say("One row has to go: every model that has read it is trained again without it.")
    row = f"{HOME / 'rows.jsonl'}:{1 + LATE_ROW}"
    dry = json.loads(ringmaster("lineage", "undo", "--row", row, "--dry-run", "--json"))
    expect(
        [model["model"] for model in dry["models"]] == ["provenance.base/1", "provenance.tuned/1"], "both have read it"
    )
    done = json.loads(ringmaster("lineage", "undo", "--row", row, "--json"))
    expect(done["versions"] == ["provenance.base/2", "provenance.tuned/2"], "both have a new version")
    reasons = {each["model"]: each["why"] for each in done["promotions"]}
    expect("on " in reasons["provenance.base/2"], "the base was compared with the one that serves")
    expect("does not serve" in reasons["provenance.tuned/2"], "only versions of models that serve are promoted")

    say("The new base is what its lineage says, too.")
    expect(reproduced("provenance.base/2")["is_equal"], "the new base is equal")


def write_rows(*, changed: int | None = None) -> None:
    """Writes the rows, the same every time; one of them may end with another word."""
    draw = random.Random(1)
    lines = [" ".join(draw.choices(WORDS, k=16)) for _ in range(400)]
    if changed is not None:
        lines[changed] += " otherwise"
    (HOME / "rows.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


def reproduced(model: str) -> dict[str, Any]:
    """Returns the report of `ringmaster reproduce` on a model."""
    result: dict[str, Any] = json.loads(ringmaster("reproduce", model, "--json"))
    return result


def ringmaster(*arguments: str) -> str:
    """Runs a command in the demo's home; returns its result."""
    print(f"\n$ ringmaster {' '.join(arguments)}", file=sys.stderr)
    command = [str(Path(sys.executable).with_name("ringmaster")), *arguments]
    environment = {**os.environ, "RINGMASTER_HOME": str(HOME)}
    done = subprocess.run(command, cwd=HOME, env=environment, stdout=subprocess.PIPE, text=True, check=False)
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
