"""A Llama of about 1 B parameters at 8,192 tokens on one GPU: model FLOPs utilisation, compared with Hugging Face's
Trainer.

    python benchmarks/gpu/steps.py [--rounds 3] [--steps 6] [--peak 989e12] [--tiny]

Needs only torch and transformers (the Trainer also accelerate; without it, only Ringmaster is measured). All contenders
take turns in one process each, on the same rows. `--tiny` tests the script itself, also on a CPU. Writes
benchmarks/results/gpu.json and the section of docs/benchmarks.md between the markers `<!-- gpu -->`.

Convention of the FLOPs (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B): for each token 6 N for the N parameters
of matrices that it is multiplied with, and 12 L h s for attention over L layers of width h and s tokens, causal or not;
recomputed operations count once. The peak is that of dense bf16 products, 989 TFLOP/s on an H100 or H200.
"""

import argparse
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "gpu.json", ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- gpu -->", "<!-- /gpu -->"
LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
TINY = {**LLAMA_1B, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64}
ROWS = 2
# Name -> changes of the job and its config; the first word of the name is the trainer.
CONTENDERS = {
    "ours, autocast": {"precision": "bf16"},
    "ours, bf16 weights": {"precision": "bf16-params"},
    "ours, bf16 weights, compiled": {"precision": "bf16-params", "compile": True},
    "ours, bf16 weights, compiled, selective": {"precision": "bf16-params", "compile": True, "recompute": "selective"},
    "Trainer, autocast": {"torch_compile": False},
    "Trainer, autocast, compiled": {"torch_compile": True},
}


class Tokens:
    """Random tokens: speed does not depend on their values."""

    def __init__(self, seq_len, vocab_size):
        self.seq_len, self.vocab_size = seq_len, vocab_size

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        import torch

        draw = torch.Generator().manual_seed(index)
        row = torch.randint(self.vocab_size, (self.seq_len,), generator=draw)
        return {"input_ids": row, "labels": row}


def tokens(seq_len, vocab_size):
    """Returns the job's data: training and held-out samples."""
    return Tokens(seq_len, vocab_size), Tokens(seq_len, vocab_size)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="of a contender in a round; three more are not counted")
    parser.add_argument("--peak", type=float, default=989e12, help="FLOP/s of the device, dense bf16")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    config = TINY if arguments.tiny else LLAMA_1B
    if arguments.contender:
        print(json.dumps(measure(arguments.contender, config, num_steps=arguments.steps)))
        return
    compare(arguments, config)


def compare(arguments, config):
    """Records seconds a step and peak bytes of every contender, over rounds in which each has its turn."""
    rows = {name: [] for name in CONTENDERS}
    for number in range(arguments.rounds):
        for name in CONTENDERS:
            command = [sys.executable, __file__, "--contender", name, "--steps", str(arguments.steps)]
            done = subprocess.run(
                command + ["--tiny"] * arguments.tiny, capture_output=True, text=True, check=False, cwd=ROOT
            )
            if done.returncode:
                print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                continue
            rows[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"round {number + 1}: {name}: {1e3 * rows[name][-1]['step_s']:.0f} ms", flush=True)
            record({name: found for name, found in rows.items() if found}, config, peak=arguments.peak)
    print(PAGE.read_text().split(BEGIN)[1].split(END)[0])


def measure(name, config, *, num_steps):
    """Returns the median seconds of one contender's whole steps, and its peak memory."""
    import torch

    kind = "gpu" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        run = ours if name.startswith("ours") else theirs
        seconds = run(config, kind, Path(folder), num_steps + 3, **CONTENDERS[name])[3:]
    peak_bytes = torch.cuda.max_memory_allocated() if kind == "gpu" else 0
    device = torch.cuda.get_device_name() if kind == "gpu" else "CPU"
    return {"step_s": statistics.median(seconds), "peak_bytes": peak_bytes, "device": device}


def job_of(config, **changes):
    """Returns the job: the model on random rows."""
    from ringmaster.techniques import DataSpec, Job, ModelSpec

    kwargs = {"seq_len": config["max_position_embeddings"], "vocab_size": config["vocab_size"]}
    return Job(
        name="llama-1b",
        model=ModelSpec(architecture="LlamaForCausalLM", config=config),
        data=DataSpec(factory="steps:tokens", kwargs=kwargs),
        clip_grad_norm=1.0,
        global_batch_size=ROWS,
        num_steps=10_000,
        **changes,
    )


def ours(config, kind, folder, num_steps, *, recompute="none", **changes):
    """Returns the seconds of steps under `single`, as a gang of one trains it."""
    sys.path.append(str(ROOT))
    from ringmaster.techniques import registry
    from ringmaster.techniques.processes.order import TRIAL, GangOrder, Slot
    from ringmaster.techniques.processes.ranks import join
    from ringmaster.techniques.training.trainer import Trainer

    path = registry.dotted_path("single")
    order = GangOrder(
        purpose=TRIAL,
        job=job_of(config, **changes),
        technique=path,
        config={"micro_batch": ROWS, "recompute": recompute},
        slots=(Slot(kind=kind, index=0),),
        folder=str(folder),
        cache_dir=str(folder),
    )
    trainer = Trainer(order, registry.load(path), join(order, 0, num_ranks=1, axes={}), beat=lambda: None)
    return [timed(trainer.step) for _ in range(num_steps)]


def theirs(config, kind, folder, num_steps, *, torch_compile):
    """Returns the seconds of steps under Hugging Face's Trainer, with the same model and rows."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    if importlib.util.find_spec("accelerate") is None:
        raise SystemExit("the Trainer needs accelerate: pip install accelerate")
    ends = []

    class Stopwatch(TrainerCallback):
        def on_step_end(self, *_, **__):
            synchronize()
            ends.append(time.perf_counter())

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS,
        max_steps=num_steps + 1,
        bf16=True,
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        torch_compile=torch_compile,
        use_cpu=kind == "cpu",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    data = Tokens(config["max_position_embeddings"], config["vocab_size"])
    model = LlamaForCausalLM(LlamaConfig(**config, use_cache=False))
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Stopwatch()]).train()
    return [b - a for a, b in itertools.pairwise(ends)]


def timed(step):
    """Returns the seconds of one call, including the work that it started on the device."""
    synchronize()
    started_s = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - started_s


def synchronize():
    """Waits for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def flops_a_step(config):
    """Returns the FLOPs of one step of ROWS rows, by the module's convention."""
    hidden, layers, tokens_a_row = (config[k] for k in ("hidden_size", "num_hidden_layers", "max_position_embeddings"))
    head_dim = hidden // config["num_attention_heads"]
    attention = hidden * hidden * 2 + 2 * hidden * head_dim * config["num_key_value_heads"]
    matrices = layers * (attention + 3 * hidden * config["intermediate_size"]) + hidden * config["vocab_size"]
    return ROWS * tokens_a_row * (6 * matrices + 12 * layers * hidden * tokens_a_row)


def record(rows, config, *, peak):
    """Writes the figures, and the section of the page between the markers."""
    flops, device = flops_a_step(config), next(iter(rows.values()))[0]["device"]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"date": str(date.today()), "device": device, "rows": rows}, indent=1) + "\n")
    steps = {name: statistics.median(row["step_s"] for row in found) for name, found in rows.items()}
    table = [
        BEGIN,
        f"One {device}, {date.today()}, {flops / 1e12:.1f} TFLOP a step of {ROWS} rows of "
        f"{config['max_position_embeddings']:,} tokens; peak taken as {peak / 1e12:.0f} TFLOP/s.",
        "",
        "| who | step | of the peak | memory |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, step_s in steps.items():
        memory = max(row["peak_bytes"] for row in rows[name]) / 2**30
        table.append(f"| {name} | {1e3 * step_s:.0f} ms | {100 * flops / step_s / peak:.1f} % | {memory:.1f} GiB |")
    page = PAGE.read_text()
    before, rest = page.split(BEGIN, 1)
    PAGE.write_text(before + "\n".join([*table, END]) + rest.split(END, 1)[1])


if __name__ == "__main__":
    main()
