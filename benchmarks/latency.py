"""The metric `latency` compared with an independent load generator: is p99 what a client sees?

    python benchmarks/latency.py [--rounds 5] [--device cuda]

Two processes load the same model: one measures it as an evaluation does, the other sends requests of its own making,
one after another, to plain transformers, as a separate load generator does. They take turns of some requests each, so
that other load on the machine falls on both alike. A round has as many requests as `p99_s` has in an evaluation. Writes
benchmarks/results/latency.json: p50 and p99 of each in every round, the 95 % interval of the metric's p99, and their
ratio, metric / generator.
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

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "latency.json"
CONFIG = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
TOKENS, MEASURE, GENERATE, GOAL = 128, "metric", "generator", 0.1
REQUESTS_A_TURN, TURNS_A_ROUND, WARM_UP_REQUESTS = 10, 100, 5


def serve(who: str, folder: str, device: str) -> None:
    """Answers each line of standard input with the seconds of some requests, as JSON."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
    act = measured(model) if who == MEASURE else generated(model, device)
    for line in sys.stdin:
        print(json.dumps(act(int(line))), flush=True)


def measured(model):
    from ringmaster.techniques.metric import metric_named

    metric = metric_named(f"latency/p99_s/tokens={TOKENS}")
    return lambda number: metric.measure(model, range(number), tokenizer_dir=None, batch_size=1).tolist()


def generated(model, device):
    import torch

    def requests(number: int) -> list[float]:
        seconds = []
        for request in range(number + WARM_UP_REQUESTS):
            tokens = torch.from_numpy(np.random.default_rng(request).integers(0, CONFIG["vocab_size"], (1, TOKENS)))
            started_s = time.monotonic()
            with torch.inference_mode():  # as the pipelines of transformers do
                model(input_ids=tokens.to(device)).logits[0, -1].argmax().item()  # a client reads an answer
            seconds.append(time.monotonic() - started_s)
        return seconds[WARM_UP_REQUESTS:]

    return requests


def interval(seconds: list[float]) -> list[float]:
    """Returns the 95 % interval of p99, by the bootstrap, as an evaluation has it."""
    draw = np.random.default_rng(0)
    values = [np.quantile(draw.choice(seconds, len(seconds)), 0.99) for _ in range(1000)]
    return np.quantile(values, [0.025, 0.975]).tolist()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    asked = arguments.parse_args()
    if asked.serve:
        serve(*asked.serve, asked.device)
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**CONFIG, num_attention_heads=8)).save_pretrained(folder)
        command = [sys.executable, __file__, "--device", asked.device, "--serve"]
        clients = {
            who: subprocess.Popen([*command, who, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for who in (MEASURE, GENERATE)
        }

        def ask(who: str) -> list[float]:
            clients[who].stdin.write(f"{REQUESTS_A_TURN}\n")
            clients[who].stdin.flush()
            return json.loads(clients[who].stdout.readline())

        rounds = []
        for number in range(asked.rounds + 1):  # the first one warms up, and is left out
            seconds: dict[str, list[float]] = {who: [] for who in clients}
            for turn in range(TURNS_A_ROUND if number else 1):
                for who in sorted(clients, reverse=turn % 2 == 0):
                    seconds[who] += ask(who)
            values = {who: {f"p{q}_s": float(np.quantile(s, q / 100)) for q in (50, 99)} for who, s in seconds.items()}
            ratio = {key: values[MEASURE][key] / values[GENERATE][key] for key in ("p50_s", "p99_s")}
            rounds.append({**values, "ratio": ratio, "p99_interval_s": interval(seconds[MEASURE])})
        for client in clients.values():
            client.stdin.close()
            client.wait()
    kept = rounds[1:]
    ratios = {key: [each["ratio"][key] for each in kept] for key in ("p50_s", "p99_s")}
    result = {
        "date": date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {asked.device}",
        "load": os.getloadavg()[0],
        "median_ratio": {key: statistics.median(values) for key, values in ratios.items()},
        "worst": {key: max(abs(value - 1) for value in values) for key, values in ratios.items()},
        "num_covered": sum(
            each["p99_interval_s"][0] <= each[GENERATE]["p99_s"] <= each["p99_interval_s"][1] for each in kept
        ),
        "num_within_goal": sum(all(abs(r - 1) <= GOAL for r in each["ratio"].values()) for each in kept),
        "rounds": kept,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "rounds"}, indent=1))


if __name__ == "__main__":
    main()
