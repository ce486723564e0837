"""The whole `ringmaster run` command against handwritten scripts, in alternation, in one run.

    python benchmarks/run.py [--rounds N] [--batch FILE]

Contenders: `ringmaster run` without stored profiles (cold, once) and with them (warm, as in every repeated retraining
run), a plain script per job one after another, and one script that trains all jobs in one process. The scripts use the
number of threads that is best for them on this machine, which is measured first. Every contender starts from prepared
data. Writes benchmarks/results/run.json and the table between the markers in docs/benchmarks.md.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "run.json"
PAGE = ROOT / "docs" / "benchmarks.md"
WARM, COLD, SCRIPTS, ONE = "ringmaster, warm profiles", "ringmaster, cold profiles", "a script per job", "one process"


class Bench:
    """The contenders: each method returns the seconds of its whole commands and their results."""

    def __init__(self, batch_file: Path, folder: Path) -> None:
        self.batch_file, self.folder = batch_file, folder
        self.home = folder / "home"
        self.jobs = _job_names(batch_file)

    def ringmaster(self, *, cold: bool) -> dict:
        """Runs `ringmaster run --json`; cold deletes profiles and records, but not the prepared data."""
        if cold:
            for file in self.home.glob("mlflow.db*"):
                file.unlink()
        seconds, out = _timed(
            [sys.executable, "-m", "ringmaster.flows.entry", "run", str(self.batch_file), "--json"],
            env={"RINGMASTER_HOME": str(self.home)},
        )
        result = json.loads(out)
        assert result["status"] == "done", result
        return {"seconds": seconds, **{k: result[k] for k in RESULT_KEYS}, "plan": result["plan"]}

    def scripts(self, threads: int) -> dict:
        """Runs a process per job, one after another."""
        runs = [self._by_hand(threads, "--job", job) for job in self.jobs]
        return {
            "seconds": sum(run["seconds"] for run in runs),
            "training_s": sum(run["training_s"] for run in runs),
            "threads": threads,
        }

    def first_job(self, threads: int) -> dict:
        """Trains the first job alone."""
        return self._by_hand(threads, "--job", self.jobs[0])

    def one_process(self, threads: int) -> dict:
        """Trains all jobs in one process."""
        return {**self._by_hand(threads), "threads": threads}

    def _by_hand(self, threads: int, *options: str) -> dict:
        script = ROOT / "benchmarks" / "by_hand.py"
        command = [sys.executable, str(script), str(self.batch_file), "--threads", str(threads), *options]
        folders = ["--cache", str(self.home / "cache"), "--models", str(self.folder / "models")]
        seconds, out = _timed([*command, *folders], env={"OMP_NUM_THREADS": str(threads)})
        return {"seconds": seconds, "training_s": json.loads(out)["training_s"]}


RESULT_KEYS = ("makespan_s", "idle_s", "num_trials", "profiling_s", "current_practice_s")


def main() -> None:
    """Runs the rounds and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=Path, default=ROOT / "examples" / "mixed_batch.yaml")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ringmaster-bench-") as folder:
        bench = Bench(arguments.batch.resolve(), Path(folder))
        threads = _best_threads(bench)  # prepares the data, too
        cold = _announced(COLD, 0, lambda: bench.ringmaster(cold=True))
        contenders = {
            SCRIPTS: lambda: bench.scripts(threads[SCRIPTS]),
            WARM: lambda: bench.ringmaster(cold=False),
            ONE: lambda: bench.one_process(threads[ONE]),
        }
        rounds = []
        for number in range(arguments.rounds):
            rounds.append({name: _announced(name, number, run) for name, run in contenders.items()})
    _write(cold, rounds, batch=arguments.batch)


def _best_threads(bench: Bench) -> dict[str, int]:
    """Returns the thread count that trains the first job fastest by hand, after a first run that prepares the data."""
    counts = sorted({1, os.cpu_count() or 1})
    bench.first_job(counts[0])
    seconds = {n: _announced(f"the first job by hand, {n} threads", -1, lambda n=n: bench.first_job(n)) for n in counts}
    best = min(counts, key=lambda count: seconds[count]["training_s"])
    return {SCRIPTS: best, ONE: best}


def _announced(name: str, number: int, run) -> dict:
    result = run()
    _say(f"round {number + 1}: {name}: {result['seconds']:.1f} s")
    return result


def _timed(command: list[str], *, env: dict[str, str]) -> tuple[float, str]:
    quiet = {"DO_NOT_TRACK": "true", "PYTHONPATH": str(ROOT)}
    started_s = time.perf_counter()
    done = subprocess.run(command, env={**os.environ, **quiet, **env}, stdout=subprocess.PIPE, text=True, check=True)
    return time.perf_counter() - started_s, done.stdout.strip().splitlines()[-1]


def _job_names(batch_file: Path) -> list[str]:
    """Returns the jobs in an order with each base before the jobs that adapt it."""
    from ringmaster.tasks.batch import load_batch

    jobs = load_batch(batch_file).jobs
    return [job.name for job in sorted(jobs, key=lambda job: job.base is not None)]


def _write(cold: dict, rounds: list[dict], *, batch: Path) -> None:
    medians = {COLD: cold["seconds"]} | {
        name: statistics.median(r[name]["seconds"] for r in rounds) for name in rounds[0]
    }
    ratios = {
        name: statistics.median(r[name]["seconds"] / r[WARM]["seconds"] for r in rounds) for name in (SCRIPTS, ONE)
    }
    warm = [r[WARM] for r in rounds]
    figures = {
        "prediction_error": statistics.median(abs(r["makespan_s"] / r["plan"]["makespan_s"] - 1) for r in warm),
        "idle_s": max(r["idle_s"] for r in warm),
        "training_share": statistics.median(r["makespan_s"] / r["seconds"] for r in warm),
        "profiling_share": cold["profiling_s"] / cold["seconds"],
    }
    machine = f"{os.cpu_count()} cores, {_cpu_name()}"
    record = {"date": str(date.today()), "machine": machine, "medians_s": medians, "ratios": ratios, "figures": figures}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({**record, "batch": batch.name, "cold": cold, "rounds": rounds}, indent=1) + "\n")
    lines = [
        f"{date.today()}, {machine}, `{batch.name}`, {len(rounds)} rounds in alternation; whole commands, medians.",
        "",
        "| | seconds | times `ringmaster run`, warm (median of the rounds' ratios) |",
        "| --- | ---: | ---: |",
        *(f"| {name} | {s:.1f} | {f'{ratios[name]:.2f}' if name in ratios else ''} |" for name, s in medians.items()),
        "",
        "| | |",
        "| --- | ---: |",
        f"| predicted against actual makespan, warm | off by {figures['prediction_error']:.1%} |",
        f"| longest idle time of a device between segments | {figures['idle_s']:.2f} s |",
        f"| training's share of the command, warm | {figures['training_share']:.0%} |",
        f"| profiling's share of the command, cold | {figures['profiling_share']:.0%} |",
        f"| threads by hand | {rounds[0][SCRIPTS]['threads']} a script, {rounds[0][ONE]['threads']} in one process |",
    ]
    _between_markers(PAGE, "run", "\n".join(lines))
    _say("\n".join(lines))


def _between_markers(page: Path, name: str, text: str) -> None:
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    content = page.read_text()
    before, _, rest = content.partition(start)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{start}\n{text}\n{end}{after}")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
