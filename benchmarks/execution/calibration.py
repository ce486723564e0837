"""Measures predictions: how many ends of a batch and its jobs lie in their 90 % interval, and how far they are off."""

import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

BATCH = Path(__file__).with_name("calibration.yaml")
RUNS = 20
BUSY_LOOPS = (0, 0, 2, 0, 1)  # processes that load the machine during each run, in turn
EARLY = 0.1  # of the makespan
ROWS = 600  # of uneven lengths
RUN = """
import json, sys, ringmaster
from ringmaster.flows.reports.progress import View
from ringmaster.flows.caller import Caller
from ringmaster.tasks.execution.execution_events import PredictionUpdate
class Predictions(View):
    def listen(self, event):
        if isinstance(event, PredictionUpdate):
            made.append(event.prediction.to_json())
caller = Caller(view=Predictions())
with open(sys.argv[2], "a") as file:
    for line in sys.stdin:
        made = []
        result = ringmaster.train_batch(sys.argv[1], caller=caller).to_json()
        row = {key: result[key] for key in ("plan", "makespan_s", "prediction", "num_trials")}
        row |= {"ends_s": {job["name"]: job["end_s"] for job in result["jobs"]}, "made": made}
        file.write(json.dumps(row) + "\\n")
        file.flush()
        print("done", flush=True)
"""


def calibration(*, num_runs: int = RUNS) -> dict:
    """Runs one small batch again and again in one process, while busy loops run in turn, with an empty home at
    first."""
    loads: list[float] = []
    with tempfile.TemporaryDirectory(prefix="ringmaster-bench-") as folder:
        results = Path(folder, "results.jsonl")
        write_batch(Path(folder))
        with _trainer(Path(folder), results) as trainer:
            for number in range(num_runs):
                loads.append(os.getloadavg()[0])
                with _busy_loops(BUSY_LOOPS[number % len(BUSY_LOOPS)]):
                    _train(trainer)
                print(f"run {number + 1}: {results.read_text().splitlines()[-1]}", file=sys.stderr, flush=True)
        runs = [json.loads(line) for line in results.read_text().splitlines()]
    return {**_figures(runs), "load_range": [min(loads), max(loads)]}


def _figures(runs: Sequence[dict]) -> dict:
    """Returns the share of makespans in their interval, its median width, and median errors, each in logarithms.

    Errors: of the plan on a quiet machine, of the plan at the machine's load, and of the prediction.
    """
    predictions = [run["prediction"] for run in runs]
    actual_s = [run["makespan_s"] for run in runs]
    planned_s = [run["plan"]["makespan_s"] for run in runs]
    quiet_s = [plan_s / p["load"] for plan_s, p in zip(planned_s, predictions, strict=True)]
    inside = [p["low_s"] <= s <= p["high_s"] for s, p in zip(actual_s, predictions, strict=True)]
    return {
        "runs": len(runs),
        "inside": sum(inside),
        "median_width": statistics.median(math.sqrt(p["high_s"] / p["low_s"]) for p in predictions) - 1,
        "error_quiet": _median_error(actual_s, quiet_s),
        "error_planned": _median_error(actual_s, planned_s),
        "error_predicted": _median_error(actual_s, [p["makespan_s"] for p in predictions]),
        "median_makespan_s": statistics.median(actual_s),
        **_later_figures(runs),
        "machine_loads": [min(p["load"] for p in predictions), max(p["load"] for p in predictions)],
    }


def _later_figures(runs: Sequence[dict]) -> dict:
    """Returns figures of the jobs' ends at first, and of all ends at the first prediction after `EARLY` of the run."""
    jobs, early, early_jobs = [], [], []
    for run in runs:
        after = [each for each in run["made"] if each["made_s"] >= EARLY * run["makespan_s"]][:1]
        pairs = [(run["prediction"], jobs, None), *((each, early_jobs, early) for each in after)]
        for prediction, of_jobs, of_batch in pairs:
            for name, end in prediction["jobs"].items():
                of_jobs.append((end["low_s"], end["end_s"], end["high_s"], run["ends_s"][name] - prediction["since_s"]))
            if of_batch is not None:
                ends = (prediction["low_s"], prediction["makespan_s"], prediction["high_s"], run["makespan_s"])
                of_batch.append(ends)
    found: dict[str, float] = {}
    for name, rows in (("jobs", jobs), ("early", early), ("early_jobs", early_jobs)):
        found |= {f"num_{name}": len(rows), f"inside_{name}": sum(low <= s <= high for low, _, high, s in rows)}
        found[f"error_{name}"] = _median_error([s for *_, s in rows], [end for _, end, _, _ in rows]) if rows else 0.0
    return found


def write_batch(folder: Path) -> Path:
    """Writes the batch, and rows of uneven lengths for its last job, whose steps differ by their padding."""
    numbers = random.Random(0)
    texts = (" ".join(f"word{numbers.randrange(50)}" for _ in range(numbers.choice((4, 8, 60)))) for _ in range(ROWS))
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    file = folder / BATCH.name
    file.write_text(BATCH.read_text())
    return file


def _median_error(actual_s: Sequence[float], predicted_s: Sequence[float]) -> float:
    return statistics.median(abs(a / p - 1) for a, p in zip(actual_s, predicted_s, strict=True))


@contextmanager
def _trainer(folder: Path, results: Path) -> Iterator[subprocess.Popen[str]]:
    """Starts the process that trains the batch once for each line that it reads."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder / BATCH.name), str(results)],
        env={**os.environ, "RINGMASTER_HOME": str(folder / "home"), "DO_NOT_TRACK": "true"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def _train(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    print("run", file=process.stdin, flush=True)
    for line in process.stdout:
        if line == "done\n":
            return
    raise RuntimeError(f"the training process ended with status {process.wait()}; its output has the reason")


@contextmanager
def _busy_loops(number: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(number):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        yield
