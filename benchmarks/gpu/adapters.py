"""32 LoRA adapters of rank 16 on one base on one GPU: a group compared with peft and Hugging Face's Trainer, and its
memory.

    python benchmarks/gpu/adapters.py [--rounds 3] [--steps 10] [--num 32] [--tiny]

The bases have about 1 B and 8 B parameters with random weights in bf16; adapters are in fp32, with 1 x 128 tokens of an
adapter in a step. *One after another* means a step of each adapter in turn; it is measured for a few adapters, and
scaled to their number. Needs only torch and transformers; without peft and accelerate, only Ringmaster is measured.
Contenders take turns, each in a process of its own. `--tiny` tests the script itself, also on a CPU. Writes its results
to benchmarks/results/gpu_adapters.json, and to docs/benchmarks.md between the markers `<!-- gpu-adapters -->`.
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

from steps import LLAMA_1B, TINY, Tokens, synchronize, timed

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "gpu_adapters.json", ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- gpu-adapters -->", "<!-- /gpu-adapters -->"
LLAMA_8B = {
    **LLAMA_1B,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
BASES = {"1 B": LLAMA_1B, "8 B": LLAMA_8B}
RANK, SEQ_LEN, ALPHA, LR = 16, 128, 16.0, 1e-4
WARM_UP_STEPS = 3
FEW = 3  # adapters that represent all, where they are trained one after another
GROUP, GROUP_RECOMPUTED = "one group", "one group, activations computed again"
SINGLE, PEFT = "ours, one after another", "peft + Trainer, one after another"
# By base: on the large one, only the memory of a group is measured.
CONTENDERS = {"1 B": (GROUP, GROUP_RECOMPUTED, SINGLE, PEFT), "8 B": (GROUP, GROUP_RECOMPUTED)}
GOAL = 3.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=10, help=f"of a contender in a round; {WARM_UP_STEPS} more are not counted"
    )
    parser.add_argument("--num", type=int, default=32, help="adapters")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--contender", nargs=2, metavar=("BASE", "WHO"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        base, who = arguments.contender
        config = TINY if arguments.tiny else BASES[base]
        print(json.dumps(measure(who, config, num=arguments.num, num_steps=arguments.steps)))
        return
    print("\n".join(table(compare(arguments), num=arguments.num)))


def compare(arguments):
    """Returns every contender's results, by base, over rounds in which each has its turn."""
    rows = {}
    for number, base in itertools.product(range(arguments.rounds), BASES):
        for who in CONTENDERS[base]:
            command = [sys.executable, __file__, "--contender", base, who, "--steps", str(arguments.steps)]
            command += ["--num", str(arguments.num), *["--tiny"] * arguments.tiny]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
            if done.returncode:
                print(f"{base}: {who}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            rows.setdefault(base, {}).setdefault(who, []).append(found)
            print(f"round {number + 1}: {base}: {who}: {1e3 * found['step_s']:.0f} ms", file=sys.stderr, flush=True)
            if not arguments.tiny:
                record(rows, num=arguments.num)
    return rows


def measure(who, config, *, num, num_steps):
    """Returns one contender's seconds for a step of all adapters, and its peak memory."""
    import torch

    kind = "gpu" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        run = {PEFT: by_peft, SINGLE: one_by_one}.get(who, together)
        found = run(config, kind, Path(folder), num=num, num_steps=num_steps, is_recomputed=who == GROUP_RECOMPUTED)
    peak_bytes = torch.cuda.max_memory_allocated() if kind == "gpu" else 0
    device = torch.cuda.get_device_name() if kind == "gpu" else "CPU"
    return {**found, "peak_bytes": peak_bytes, "device": device}


def together(config, kind, folder, *, num, num_steps, is_recomputed):
    """Measures steps of a group of all adapters."""
    sys.path.append(str(ROOT))
    import torch

    from ringmaster.techniques.data import prepare
    from ringmaster.techniques.models.build import build_model
    from ringmaster.techniques.multi_adapter.multi_adapter_base import MultiAdapterBase
    from ringmaster.techniques.training.fused.group import FusedGroup
    from ringmaster.techniques.training.fused.member import GroupMember

    device = torch.device("cuda" if kind == "gpu" else "cpu")
    jobs = [job_of(config, number) for number in range(num)]
    data = prepare(jobs[0].data, cache_dir=folder)
    base = build_model(jobs[0].model, data=data, seed=0).to(device, torch.bfloat16)
    group = FusedGroup(MultiAdapterBase(base, recompute="full" if is_recomputed else "none"))
    members = [GroupMember(order_of(job, kind, folder), base, device=device) for job in jobs]
    for member in members:
        group.join(member)
    seconds = [timed(group.step) for _ in range(WARM_UP_STEPS + num_steps)][WARM_UP_STEPS:]
    # An adapter needs its weights, its gradients, and two moments.
    adapters_bytes = sum(4 * p.numel() * p.element_size() for m in members for p in m.tree.parameters())
    base_bytes = sum(p.numel() * p.element_size() for p in base.parameters())
    return {"step_s": statistics.median(seconds), "base_bytes": base_bytes, "adapters_bytes": adapters_bytes}


def one_by_one(config, kind, folder, *, num, num_steps, **_):
    """Measures steps of the first few adapters under `single`, each as a gang of one trains it, scaled to all."""
    sys.path.append(str(ROOT))
    from ringmaster.techniques import registry
    from ringmaster.techniques.processes.ranks import join
    from ringmaster.techniques.training.trainer import Trainer

    medians = []
    for number in range(min(num, FEW)):
        order = order_of(job_of(config, number, precision="bf16-params"), kind, folder)
        ranks = join(order, 0, num_ranks=1, axes={})
        trainer = Trainer(order, registry.load(order.technique), ranks, beat=lambda: None)
        medians.append(
            statistics.median([timed(trainer.step) for _ in range(WARM_UP_STEPS + num_steps)][WARM_UP_STEPS:])
        )
        del trainer
    return {"step_s": num * statistics.mean(medians)}


def by_peft(config, kind, folder, *, num, num_steps, **_):
    """Measures the same steps by peft and the Trainer, with a base in bf16."""
    for package in ("peft", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise SystemExit(f"{package} is not there, so there is nothing to compare with: pip install {package}")
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

    medians = []
    for number in range(min(num, FEW)):
        base = LlamaForCausalLM(LlamaConfig(**config, use_cache=False)).to(torch.bfloat16)
        lora = LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0
        )
        arguments = TrainingArguments(
            output_dir=str(folder / str(number)),
            per_device_train_batch_size=1,
            max_steps=num_steps + WARM_UP_STEPS + 1,
            learning_rate=LR,
            bf16=True,
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            use_cpu=kind == "cpu",
            dataloader_num_workers=0,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        clock = stopwatch()
        rows = Tokens(seq_len_of(config), config["vocab_size"])
        trainer = Trainer(model=get_peft_model(base, lora), args=arguments, train_dataset=rows, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        medians.append(statistics.median([b - a for a, b in itertools.pairwise(clock.ends)][WARM_UP_STEPS:]))
        del trainer, base
    return {"step_s": num * statistics.mean(medians)}


def stopwatch():
    """Returns a callback that records when steps end."""
    from transformers import TrainerCallback

    class Stopwatch(TrainerCallback):
        def __init__(self):
            self.ends = []

        def on_step_end(self, *_, **__):
            synchronize()
            self.ends.append(time.perf_counter())

    return Stopwatch()


def seq_len_of(config):
    return min(SEQ_LEN, config["max_position_embeddings"])


def job_of(config, number, **changes):
    """Returns an adapter job on the model, whose weights follow from a common seed."""
    from ringmaster.techniques import Adapter, DataSpec, Job, ModelSpec, OptimizerSpec

    kwargs = {"seq_len": seq_len_of(config), "vocab_size": config["vocab_size"]}
    return Job(
        name=f"adapter-{number}",
        model=ModelSpec(architecture="LlamaForCausalLM", config=config),
        adapter=Adapter(rank=RANK, alpha=ALPHA),
        data=DataSpec(factory="steps:tokens", kwargs=kwargs),
        optimizer=OptimizerSpec(lr=LR),
        clip_grad_norm=1.0,
        global_batch_size=1,
        num_steps=10_000,
        **changes,
    )


def order_of(job, kind, folder):
    from ringmaster.techniques import registry
    from ringmaster.techniques.processes.order import TRIAL, GangOrder, Slot

    return GangOrder(
        purpose=TRIAL,
        job=job,
        technique=registry.dotted_path("single"),
        config={"micro_batch": 1, "recompute": "none"},
        slots=(Slot(kind=kind, index=0),),
        folder=str(folder),
        cache_dir=str(folder),
    )


def table(rows, *, num):
    """Yields the section of the page: seconds, ratios by round, and memory compared with that of one base and the
    adapters."""
    device = next(iter(next(iter(rows.values())).values()))[0]["device"]
    yield f"One {device}, {date.today()}: {num} adapters of rank {RANK}, 1 x {SEQ_LEN} tokens each; bf16, adapters in"
    yield f"fp32. Goal: a group {GOAL:.0f} times as fast as peft + Trainer on 1 B."
    yield ""
    yield "| base | who | a step of all | times the group | memory | of that one base and all adapters |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for base, found in rows.items():
        for who, mine in found.items():
            step_s = statistics.median(row["step_s"] for row in mine)
            times = f"{statistics.median(ratios(mine, found[GROUP])):.2f}" if GROUP in found else ""
            peak_bytes = max(row["peak_bytes"] for row in mine)
            least = mine[0].get("base_bytes", 0) + mine[0].get("adapters_bytes", 0)
            memory = f"{peak_bytes / 2**30:.1f} GiB" if peak_bytes else ""
            share = f"{least / 2**30:.1f} GiB" if least else ""
            yield f"| {base} | {who} | {1e3 * step_s:.0f} ms | {times} | {memory} | {share} |"


def ratios(mine, group):
    """Returns the seconds over those of the group, by round."""
    return [one["step_s"] / other["step_s"] for one, other in zip(mine, group, strict=False)]


def record(rows, *, num):
    """Writes the figures, and the section of the page between the markers."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"date": str(date.today()), "num": num, "rows": rows}, indent=1) + "\n")
    before, rest = PAGE.read_text().split(BEGIN, 1)
    PAGE.write_text(before + "\n".join([BEGIN, *table(rows, num=num), END]) + rest.split(END, 1)[1])


if __name__ == "__main__":
    main()
