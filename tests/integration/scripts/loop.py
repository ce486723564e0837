"""A plain loop without any library. Ringmaster needs the five lines with `report`."""

import json
import random
import sys
import time

from ringmaster import report

NUM_STEPS = int(sys.argv[1])
step, model, generator = 0, 1.0, random.Random(1)
if folder := report.resume():
    step, model, state = json.loads((folder / "state.json").read_text())
    generator.setstate((state[0], tuple(state[1]), state[2]))
while step < NUM_STEPS:
    time.sleep(0.01)
    step, model = step + 1, model * (0.9 + 0.1 * generator.random())
    report.report(step=step, loss=model)
    if report.should_save():
        with report.checkpoint() as folder:
            (folder / "state.json").write_text(json.dumps([step, model, generator.getstate()]))
print("the loop is over")
