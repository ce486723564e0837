"""Several retraining runs in one process: new data, poisoned data, broken data, and failing training.

Run as `python -m tests.integration.retraining.runs FOLDER`, with RINGMASTER_HOME set. Each run's result, and the
aliases after it, are written to FOLDER/answers.json.
"""

import json
import random
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

FILE = """\
name: shop
devices: {{cpu: 1}}
models:
  - name: writer
    job: {{{job}, optimizer: {{lr: {lr}}}}}
    data: {{path: "writer/*.jsonl", seq_len: 16, vocab_size: 300, held_out: 0.2}}
  - name: guarded
    job: {{{job}, optimizer: {{lr: 1e-2}}}}
    data: {{path: "guarded/*.jsonl", seq_len: 16, vocab_size: 300, held_out: 0.2}}
    compare_on: {{path: "trusted/*.jsonl", seq_len: 16, vocab_size: 300, held_out: 0.5}}
"""
BROKEN = """\
  - name: broken
    job: {{{job}}}
    data: {{path: "broken/*.jsonl", seq_len: 16, vocab_size: 300}}
"""
JOB = """\
model: {architecture: LlamaForCausalLM, config: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, \
num_attention_heads: 2}}, global_batch_size: 2, num_steps: 60, techniques: [single]"""
ALIASES = ("champion", "previous", "challenger")
SUBJECTS, VERBS, PLACES = ["the cat", "a dog", "my friend"], ["sat on", "ran to", "saw"], ["the mat", "a house"]


def rows(seed: int, *, number: int = 60) -> str:
    """Returns rows of short sentences, different for each seed, from one distribution."""
    draw = random.Random(seed)

    def sentence() -> str:
        return f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.choice(PLACES)}."

    texts = [" ".join(sentence() for _ in range(6)) for _ in range(number)]
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def garbage(seed: int) -> str:
    """Returns rows of random letters."""
    draw = random.Random(seed)
    texts = ["".join(draw.choices("qxzjkvwy ", k=150)) for _ in range(60)]
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


class Nights:
    """A folder with a retraining file and its data, and the result of each run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answers: dict[str, Any] = {}
        self.say(lr="1e-2")

    def say(self, *, lr: str, more: str = "") -> None:
        """Writes the retraining file, with the first model's learning rate and further models."""
        (self.folder / "retraining.yaml").write_text((FILE + more).format(job=JOB, lr=lr))

    def put(self, name: str, text: str) -> None:
        """Writes a data file."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def run(self, run_date: str) -> None:
        """Performs the retraining run of the next day."""
        from ringmaster.flows.batch.flow_runs import result_of
        from ringmaster.flows.caller import Caller
        from ringmaster.flows.retrain_daily import retrain_daily

        day = datetime(2026, 11, 1, tzinfo=UTC) + timedelta(days=len(self.answers))
        file, caller = str(self.folder / "retraining.yaml"), Caller(clock=day.timestamp)
        answer = result_of(lambda: retrain_daily(file=file, night=day.date().isoformat(), caller=caller))
        plain = json.loads(json.dumps(answer, allow_nan=False))
        records = self.ledger.models()
        versions = {f"{m.registered_name}/{m.version}": [m.kind, list(m.parents), m.model_id] for m in records}
        self.answers[run_date] = {**plain, "aliases": self.aliases(), "versions": versions}

    def aliases(self) -> dict[str, dict[str, int]]:
        """Returns the versions that each model's aliases point to."""
        return {
            model: {
                alias: record.version
                for alias in ALIASES
                if (record := self.ledger.get_alias(f"shop.{model}", alias)) is not None and record.version
            }
            for model in ("writer", "guarded")
        }

    def forget(self, model: str) -> None:
        """Removes all aliases and decisions of a model, as if the run had ended before its comparison."""
        from ringmaster.tasks.retraining import promotion

        client, name = self.ledger.client, f"shop.{model}"
        for alias, version in self.aliases()[model].items():
            client.delete_registered_model_alias(name, alias)
            client.set_model_version_tag(name, str(version), promotion.TAG, "[]")

    @property
    def ledger(self) -> Any:
        """The ledger that the flows write."""
        from ringmaster.flows import settings
        from ringmaster.model_lineage import Ledger

        return Ledger(settings.tracking_uri(settings.home()), artifact_root=settings.home() / "mlartifacts")


def main(folder: Path) -> None:
    """Performs all retraining runs."""
    from ringmaster.flows import settings

    settings.prepare_environment(settings.home())
    nights = Nights(folder)
    for name in ("writer", "guarded", "trusted"):
        nights.put(f"{name}/day1.jsonl", rows(1))
    nights.run("first")
    nights.forget("guarded")
    nights.run("again")
    nights.put("writer/day2.jsonl", rows(2))
    nights.put("guarded/day1.jsonl", garbage(3))
    nights.run("new data, and poisoned data")
    nights.put("writer/day3.jsonl", rows(4))
    nights.put("broken/day1.jsonl", "{this is not JSON\n")
    nights.say(lr="1e30", more=BROKEN)
    nights.run("a failing job, and broken data")
    (folder / "answers.json").write_text(json.dumps(nights.answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
