"""The tensor store compared with plain safetensors: size by kind of adaptation, and rates of adding and restoring."""

import json
import os
import shutil
import statistics
import time

import numpy as np

from benchmarks.lineage.measuring import GOAL_MB_S, ROUNDS, stamp
from ringmaster.model_lineage.tensors import TensorStore

GOALS = {"full fine-tune, bf16": 1.5, "full fine-tune, fp32": 1.2}
STEPS, ROWS, SEQ_LEN = 40, 4, 64
NUM_TUNED, FAMILY_GOAL = 12, 0.40
TUNING_LR = 2e-5  # a usual rate of full fine-tunes
SIZES = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 4}


def trained(start=None, *, lr, frozen=(), seed=0):
    """Returns a small Llama's weights after some steps, from random ones or `start`; `frozen` lists fixed prefixes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2048, num_key_value_heads=4, **SIZES))
    if start is not None:
        model.load_state_dict(start)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not name.startswith(tuple(frozen))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        ids = torch.randint(0, 2048, (ROWS, SEQ_LEN), generator=draw).sort(dim=1).values  # sorted: an order to learn
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def family():
    """Returns name -> (its parent's name or None, its weights), for each kind of adaptation."""
    import torch

    base = trained(lr=1e-3)
    tuned, other = trained(base, lr=TUNING_LR, seed=1), trained(base, lr=TUNING_LR, seed=2)
    lower = ("model.embed_tokens", "model.layers.0.", "model.layers.1.", "model.layers.2.")
    stem = {name: value for name, value in base.items() if name.startswith(lower)}

    def halved(weights):
        return {name: value.to(torch.bfloat16) for name, value in weights.items()}

    def pruned(value):
        return torch.where(value.abs() < value.abs().median(), 0.0, value) if value.ndim > 1 else value

    draw = torch.Generator().manual_seed(3)
    adapter = {f"layers.{i}.{w}": torch.randn(8, 256, generator=draw) for i in range(6) for w in ("lora_A", "lora_B")}
    return {
        "base, fp32": (None, base),
        "base, bf16": (None, halved(base)),
        "full fine-tune, fp32": ("base, fp32", tuned),
        "full fine-tune, bf16": ("base, bf16", halved(tuned)),
        "lower half frozen, fp32": ("base, fp32", trained(base, lr=TUNING_LR, frozen=lower, seed=4)),
        "another head on a shared stem, fp32": (None, {**trained(lr=1e-3, seed=5), **stem}),
        "half of the weights pruned, fp32": ("base, fp32", {name: pruned(value) for name, value in base.items()}),
        "average of two fine-tunes, fp32": (
            "full fine-tune, fp32",
            {name: (value + other[name]) / 2 for name, value in tuned.items()},
        ),
        "adapter of rank 8, its own file": ("base, fp32", adapter),
    }


def measure_ratios(folder):
    """Returns rows of (kind, bytes of plain safetensors, bytes added to the store, the stem's share of these)."""
    from safetensors.torch import save_file

    store, ids, rows = TensorStore(folder / "store"), {}, []
    for name, (parent, weights) in family().items():
        target = folder / "models" / name
        target.mkdir(parents=True)
        save_file(weights, target / "model.safetensors")
        before = store.size_bytes()
        ids[name] = store.add(target, parent=ids.get(parent)).id
        plain = (target / "model.safetensors").stat().st_size
        rows.append({"kind": name, "plain_bytes": plain, "added_bytes": store.size_bytes() - before})
        print(rows[-1], flush=True)
    return rows


def measure_family(folder):
    """Returns the bytes of a base and its bf16 fine-tunes as plain files, recorded with them, and once shared."""
    import torch
    from safetensors.torch import save_file

    base = trained(lr=1e-3)
    models = [base, *(trained(base, lr=TUNING_LR, seed=seed) for seed in range(1, 1 + NUM_TUNED))]
    store, parent, plain_bytes = TensorStore(folder / "home" / "tensors"), None, 0
    for number, weights in enumerate(models):
        target = folder / "home" / "models" / str(number)
        target.mkdir(parents=True)
        save_file({name: value.to(torch.bfloat16) for name, value in weights.items()}, target / "model.safetensors")
        plain_bytes += on_disk(target)
        stored = store.add(target, parent=parent)
        parent = parent or stored.id
    found = {"plain_bytes": plain_bytes, "recorded_bytes": on_disk(folder / "home")}
    for target in (folder / "home" / "models").iterdir():
        store.share(target)
    found["shared_bytes"] = on_disk(folder / "home")
    print(found, flush=True)
    return found


def on_disk(folder):
    """Returns the bytes of a folder's files, as `du --apparent-size` counts them."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure_rates(folder, *, megabytes):
    """Returns rows of (operation, MB per wall second, MB per CPU second) of a larger model, medians of ROUNDS."""
    base, tuned = trained(lr=1e-3), None
    tuned = trained(base, lr=TUNING_LR, seed=1)
    draw = np.random.default_rng(0)
    flat = [np.concatenate([value.numpy().ravel() for value in weights.values()]) for weights in (base, tuned)]
    rows = []
    for dtype in ("F32", "BF16"):
        models = {"base": {}, "tuned": {}}
        num_items = megabytes * 10**6 // (4 if dtype == "F32" else 2)
        for i in range(max(1, num_items // (1 << 21))):  # tensors of 2 M numbers, no two alike
            at = draw.integers(0, len(flat[0]), 1 << 21)
            for target, values in zip(models.values(), flat, strict=True):
                target[f"layers.{i}.weight"] = values[at] if dtype == "F32" else halved(values[at])
        for name, tensors in models.items():
            save(folder / dtype / name, tensors, dtype)
        del models
        rows += rates(folder / dtype, dtype)
        shutil.rmtree(folder / dtype)
    return rows


def rates(folder, dtype):
    """Measures how fast a base and its fine-tune are added and restored."""
    num_bytes = (folder / "base" / "model.safetensors").stat().st_size
    found = {}
    for _ in range(ROUNDS):
        shutil.rmtree(folder / "store", ignore_errors=True)
        store = TensorStore(folder / "store")
        base = clocked(found, "add a base", lambda: store.add(folder / "base"))  # noqa: B023
        tuned = clocked(found, "add a fine-tune", lambda: store.add(folder / "tuned", parent=base.id))  # noqa: B023
        for what, model in (("restore a base", base), ("restore a fine-tune", tuned)):
            shutil.rmtree(folder / "out", ignore_errors=True)
            clocked(found, what, lambda: store.restore(model.id, folder / "out"))  # noqa: B023
        shutil.rmtree(folder / "out", ignore_errors=True)
        clocked(found, "copy and sync the file, for comparison", lambda: copied(folder))
    rows = [
        {
            "what": f"{what}, {dtype}",
            "wall_mb_s": num_bytes / 1e6 / statistics.median(wall for wall, _ in seconds),
            "cpu_mb_s": num_bytes / 1e6 / statistics.median(cpu for _, cpu in seconds),
        }
        for what, seconds in found.items()
    ]
    for row in rows:
        print(row, flush=True)
    return rows


def copied(folder):
    """Writes a copy of the plain file and syncs it: the disk's own rate."""
    content = (folder / "base" / "model.safetensors").read_bytes()
    (folder / "out").mkdir()
    with (folder / "out" / "model.safetensors").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def clocked(found, what, action):
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    result = action()
    found.setdefault(what, []).append((time.perf_counter() - wall_s, time.process_time() - cpu_s))
    return result


def halved(values):
    """Converts float32 to bfloat16, rounded to nearest, as 16-bit words."""
    words = values.view(np.uint32)
    return ((words + ((words >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16)


def save(folder, tensors, dtype):
    """Writes a safetensors file; numpy has no bfloat16."""
    folder.mkdir(parents=True)
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    said = json.dumps(header).encode()
    said += b" " * (-len(said) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(said).to_bytes(8, "little") + said)
        for values in tensors.values():
            file.write(values.data)


def store_lines(ratios, family, rates):
    """Returns the tables of the store."""
    recorded, shared = (family[key] / family["plain_bytes"] for key in ("recorded_bytes", "shared_bytes"))
    return [
        f"{stamp()} A Llama of 5 M parameters, {STEPS} steps of training, then {STEPS} of each adaptation (AdamW, lr "
        f"{TUNING_LR:g}); *smaller*: the plain safetensors file over what it adds to the store.",
        "",
        "| kind | safetensors, MB | added, MB | times smaller | goal |",
        "| --- | ---: | ---: | ---: | --- |",
        *map(ratio_line, ratios),
        "",
        f"The base and {NUM_TUNED} full fine-tunes in bf16 take {shared:.3f} of plain files once their folders share "
        f"the store (goal: at most {FAMILY_GOAL:.2f}), and {recorded:.3f} while the runs' folders have plain files.",
        "",
        f"Rates, of the plain file's bytes; medians of {ROUNDS}.",
        "",
        "| what | MB/s | a second of the processor | goal |",
        "| --- | ---: | ---: | --- |",
        *map(rate_line, rates),
    ]


def ratio_line(row):
    plain, added, goal = row["plain_bytes"], row["added_bytes"], GOALS.get(row["kind"])
    return (
        f"| {row['kind']} | {plain / 1e6:.2f} | {added / 1e6:.2f} | {plain / added:.2f} | "
        f"{'' if goal is None else f'>= {goal}'} |"
    )


def rate_line(row):
    goal = f">= {GOAL_MB_S}, or the disk's" if row["what"].startswith("restore") else ""
    return f"| {row['what']} | {row['wall_mb_s']:.0f} | {row['cpu_mb_s']:.0f} | {goal} |"
