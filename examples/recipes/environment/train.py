"""A model of single words: how often each is in the text so far. It is trained in the environment of its job."""

import json
import math
from collections import Counter

from word_counts import counted

from ringmaster import report

LINES = ["the quick brown fox jumps over the lazy dog", "the dog sleeps", "a fox is quick", "the fox is brown"]

folder = report.resume()
state = json.loads((folder / "counts.json").read_text()) if folder else {"step": 0, "counts": {}}
counts = Counter(state["counts"])
for step in range(state["step"], report.order["num_steps"]):
    line = counted([LINES[step % len(LINES)]])
    total = counts.total() + len(counts) + 1
    loss = -sum(number * math.log((counts[word] + 1) / total) for word, number in line.items()) / line.total()
    counts.update(line)
    report.report(step=step + 1, loss=loss, words=len(counts))
    if report.should_save():
        with report.checkpoint() as folder:
            (folder / "counts.json").write_text(json.dumps({"step": step + 1, "counts": counts}))
