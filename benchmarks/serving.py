"""A training endpoint: clients together against one after another, one client against a plain loop, and its requests.

    python -m benchmarks.serving [PART ...] [--rounds 5] [--tiny]

Parts: `clients` (16 clients of one row a step: CPU seconds one after another and together, and the share of the time
that the disk takes), `plain` (one client's step against transformers and peft in a plain loop) and `request` (a request
to a warm server, beyond its computation). Contenders take turns. Writes benchmarks/results/serving.json and the section
of docs/benchmarks.md between the markers `<!-- serving -->`; `--tiny` tries all parts and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.page import write_section

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "serving.json"
NUM_CLIENTS, RANK, NUM_TOKENS, WARM_UP = 16, 8, 2048, 3


@dataclass(frozen=True, kw_only=True)
class Size:
    """A base, and the tokens of a row."""

    layers: int
    hidden: int
    length: int

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.layers} layers of {self.hidden}, rows of {self.length}"


SMALL, MIDDLE = Size(layers=4, hidden=128, length=64), Size(layers=6, hidden=256, length=128)


def main() -> None:
    """Measures the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}. To fix: choose from {', '.join(PARTS)}")
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}  # before torch is imported
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part in options.parts or PARTS:
        sizes = [Size(layers=2, hidden=64, length=32)] if options.tiny else [SMALL, MIDDLE]
        found = [PARTS[part](size, 1 if options.tiny else options.rounds) for size in sizes]
        known[part] = {"date": date.today().isoformat(), "load": round(os.getloadavg()[0], 1), "found": found}
        print(json.dumps(found), flush=True)
    if not options.tiny:
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
        write_section("serving", table(known))


def clients(size: Size, rounds: int) -> dict[str, Any]:
    """Returns the CPU seconds of a step of all clients, and the share of the wall time that the disk is waited for."""
    from ringmaster.features.endpoint.compute.requests import AdamStep

    with opened(size) as endpoint:
        requests = [request_of(f"c{i}", size) for i in range(NUM_CLIENTS)]
        steps = [AdamStep(client=each.client) for each in requests]

        def together() -> None:
            endpoint.compute(requests)
            endpoint.step(steps)

        def one_after_another() -> None:
            for request, step in zip(requests, steps, strict=True):
                endpoint.compute([request])
                endpoint.step([step])

        def disk_share() -> float:
            started_s, before_s = time.perf_counter(), endpoint.storing_s
            together()
            return (endpoint.storing_s - before_s) / (time.perf_counter() - started_s)

        for _ in range(WARM_UP):
            together()
        times = [(cpu_seconds(one_after_another), cpu_seconds(together)) for _ in range(rounds)]
        ratios = [one / all_ for one, all_ in times]
        return {
            "base": size.name,
            "one_after_another_s": statistics.median(one for one, _ in times),
            "together_s": statistics.median(all_ for _, all_ in times),
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
            "disk_share": statistics.median(disk_share() for _ in range(2 * rounds)),
        }


def plain(size: Size, rounds: int) -> dict[str, Any]:
    """Returns the CPU seconds of a step of one client and of a plain loop of transformers and peft, and the disk's."""
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.nn import functional
    from transformers import LlamaForCausalLM

    from ringmaster.features.endpoint.compute.requests import AdamStep

    with opened(size, num_clients=1) as endpoint:
        request = request_of("c0", size)
        (row,) = request.rows
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
        config = LoraConfig(r=RANK, lora_alpha=32, target_modules=names)
        model: Any = get_peft_model(LlamaForCausalLM.from_pretrained(endpoint.base), config)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, betas=(0.9, 0.95))

        def loop() -> None:
            logits = model(input_ids=torch.tensor([row.tokens])).logits[0]
            loss = functional.cross_entropy(logits, row.loss_inputs["target_tokens"], reduction="sum")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        def ours() -> None:
            endpoint.compute([request])
            endpoint.step([AdamStep(client="c0")])

        for _ in range(WARM_UP):
            loop()
            ours()
        before_s, num_steps = endpoint.storing_s, 10 * rounds
        times = [(cpu_seconds(loop), cpu_seconds(ours)) for _ in range(num_steps)]
        disk_s = (endpoint.storing_s - before_s) / num_steps
        plain_s, ours_s = (statistics.median(column) for column in zip(*times, strict=True))
        ratio = ours_s / plain_s
        return {"base": size.name, "plain_s": plain_s, "ours_s": ours_s, "ratio": ratio, "disk_s": disk_s}


def request(size: Size, rounds: int) -> dict[str, Any]:
    """Returns the seconds of a request's computation, and of the whole request to a warm server."""
    import httpx

    with opened(size, num_clients=1) as endpoint:
        wanted = request_of("c0", size)
        for _ in range(WARM_UP):
            endpoint.compute([wanted])
        computed_s = statistics.median(wall_seconds(lambda: endpoint.compute([wanted])) for _ in range(5 * rounds))
        with served(endpoint.base) as (url, key):
            http = httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=60, trust_env=False)
            model = create_model(http)
            send(http, "forward_backward", loss_of(model, 1, wanted))
            first_s = [
                wall_seconds(lambda seq=seq: send(http, "forward_backward", loss_of(model, seq, wanted)))  # type: ignore[misc]
                for seq in range(2, 2 + 5 * rounds)
            ]
            request_s = statistics.median(first_s)
    return {"base": size.name, "computed_s": computed_s, "request_s": request_s, "beyond_s": request_s - computed_s}


PARTS: Mapping[str, Callable[[Size, int], dict[str, Any]]] = {"clients": clients, "plain": plain, "request": request}


def cpu_seconds(act: Callable[[], object]) -> float:
    """Returns the CPU seconds of this process, which other work on the machine hardly changes."""
    started_s = time.process_time()
    act()
    return time.process_time() - started_s


def wall_seconds(act: Callable[[], object]) -> float:
    """Returns the seconds of an action."""
    started_s = time.perf_counter()
    act()
    return time.perf_counter() - started_s


@contextmanager
def opened(size: Size, *, num_clients: int = NUM_CLIENTS) -> Iterator[Any]:
    """An endpoint with clients; `base` is the folder of its base."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ringmaster.features.endpoint.compute.endpoint import Endpoint
    from ringmaster.features.endpoint.compute.requests import AdapterSpec, EndpointLimits

    torch.manual_seed(0)
    heads = size.hidden // 32
    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=8 * size.hidden // 3 // 8 * 8,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=NUM_TOKENS,
        max_position_embeddings=1024,
    )
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        LlamaForCausalLM(config).save_pretrained(base)
        limits = EndpointLimits(max_adapters=NUM_CLIENTS, max_rank=RANK, seq_len=512)
        endpoint: Any = Endpoint(base=str(base), limits=limits, folder=Path(folder) / "endpoint")
        endpoint.base = base
        for i in range(num_clients):
            endpoint.add(f"c{i}", AdapterSpec(rank=RANK, seed=i))
        yield endpoint
        endpoint.close()


def request_of(client: str, size: Size) -> Any:
    """Returns the loss of one random row."""
    import torch

    from ringmaster.features.endpoint.compute.requests import LossRequest, TokenRow

    tokens = torch.randint(NUM_TOKENS, (size.length + 1,))
    inputs = {"target_tokens": tokens[1:], "weights": torch.ones(size.length)}
    return LossRequest(
        client=client, rows=(TokenRow(tokens=tuple(tokens[:-1].tolist()), loss_inputs=inputs),), loss="cross_entropy"
    )


@contextmanager
def served(base: Path) -> Iterator[tuple[str, str]]:
    """A server of the base in a process of its own: its URL and key."""
    file = base.parent / "endpoint.yaml"
    entry = {
        "bases": [{"name": "base", "from_pretrained": str(base)}],
        "max_adapters": 4,
        "max_rank": RANK,
        "seq_len": 512,
    }
    file.write_text(json.dumps({"name": "bench", "serve": entry}))
    command = [sys.executable, "-c", "from ringmaster.flows.entry import main; main()", "serve", str(file), "--json"]
    environment = {**os.environ, "RINGMASTER_HOME": str(base.parent / "home")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        answer = json.loads(process.stdout.readline())
        yield answer["url"], answer["key"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def create_model(http: Any) -> str:
    """Returns the id of a new client's adapter."""
    session = post(http, "create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"})["session_id"]
    wanted = {"session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": RANK}}
    return str(send(http, "create_model", wanted)["model_id"])


def loss_of(model: str, seq: int, wanted: Any) -> dict[str, Any]:
    """Returns the message of a loss."""
    (row,) = wanted.rows
    inputs = {
        name: {
            "data": value.tolist(),
            "dtype": "float32" if value.is_floating_point() else "int64",
            "shape": [len(value)],
        }
        for name, value in row.loss_inputs.items()
    }
    chunk = {"type": "encoded_text", "tokens": list(row.tokens)}
    data = [{"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs}]
    return {"model_id": model, "seq_id": seq, "forward_backward_input": {"data": data, "loss_fn": wanted.loss}}


def post(http: Any, path: str, body: Mapping[str, Any]) -> Any:
    """Returns the answer to a message."""
    answer = http.post(path, json=body)
    answer.raise_for_status()
    return answer.json()


def send(http: Any, path: str, body: Mapping[str, Any]) -> Any:
    """Returns the result of a message that is answered later."""
    future = post(http, path, body)["request_id"]
    while (answer := http.post("retrieve_future", json={"request_id": future})).status_code == 408:
        pass
    answer.raise_for_status()
    return answer.json()


def table(known: Mapping[str, Any]) -> str:
    """Returns the section of the page."""
    lines = []

    def add(part: str, title: str, columns: Sequence[str], row: Callable[[Any], Sequence[str]]) -> None:
        if part not in known:
            return
        measured = known[part]
        lines.append(f"{title} {measured['date']}, a load of {measured['load']} at the end.\n")
        lines.append(f"| base | {' | '.join(columns)} |")
        lines.append("|---|" + "---:|" * len(columns))
        lines.extend(f"| {each['base']} | {' | '.join(row(each))} |" for each in measured["found"])
        lines.append("")

    add(
        "clients",
        f"**A step of {NUM_CLIENTS} clients of one row**, rank {RANK}, in CPU seconds of one thread; in brackets the "
        "least and the most of the rounds. Goal: 1.5 times one after another.",
        ["one after another", "together", "times", "waiting for the disk"],
        lambda x: [
            ms(x["one_after_another_s"]),
            ms(x["together_s"]),
            f"{x['ratio']:.2f} ({x['least']:.2f} to {x['most']:.2f})",
            f"{x['disk_share']:.1%}",
        ],
    )
    add(
        "plain",
        "**A step of one client**, against transformers and peft in a plain loop, in CPU seconds of one thread; the "
        "disk's seconds come on top. Goal: 1.15 times.",
        ["plain loop", "client", "times", "the disk"],
        lambda x: [ms(x["plain_s"]), ms(x["ours_s"]), f"{x['ratio']:.2f}", ms(x["disk_s"])],
    )
    add(
        "request",
        "**A request to a warm server**, from its sending to its result. Goal: 50 ms beyond its computation.",
        ["computation", "request", "beyond"],
        lambda x: [ms(x["computed_s"]), ms(x["request_s"]), ms(x["beyond_s"])],
    )
    return "\n".join(lines)


def ms(seconds: float) -> str:
    """Returns seconds in milliseconds."""
    return f"{1000 * seconds:.1f} ms"


if __name__ == "__main__":
    main()
