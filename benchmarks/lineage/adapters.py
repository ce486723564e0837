"""Sixteen adapters of one base in the tensor store, compared with full copies of the model and with their own files."""

from __future__ import annotations

import shutil
import statistics
import time

from benchmarks.lineage.measuring import ROUNDS, stamp
from benchmarks.lineage.tensors import ROWS, SEQ_LEN, SIZES, trained
from ringmaster.model_lineage.tensors import TensorStore

NUM_ADAPTERS, RANK, LR, STEPS = 16, 8, 1e-3, 10
MODEL, ADAPTER = "model.safetensors", "adapter_model.safetensors"


def measure_adapters(folder):
    """Returns the stored bytes of a base and of adapters that were trained on it, and the seconds to restore them."""
    from safetensors.torch import save_file

    base = trained(lr=1e-3)
    (folder / "base").mkdir(parents=True)
    save_file(base, folder / "base" / MODEL)
    store = TensorStore(folder / "store")
    kept = store.add(folder / "base").id
    base_stored, base_bytes = store.size_bytes(), _size(folder / "base")
    ids, own_bytes = [], 0
    for seed in range(NUM_ADAPTERS):
        mine = folder / f"adapter-{seed}"
        mine.mkdir()
        save_file(adapted(base, seed=seed), mine / ADAPTER)
        own_bytes += _size(mine)
        ids.append(store.add(mine, parent=kept).id)
    found = {
        "base_bytes": base_bytes,
        "own_bytes": own_bytes,
        "separate_bytes": NUM_ADAPTERS * base_bytes + own_bytes,
        "stored_bytes": store.size_bytes(),
        "base_stored_bytes": base_stored,
        "restore_base": _restoring(store, [kept], folder / "out"),
        "restore_adapters": _restoring(store, ids, folder / "out"),
    }
    print(found, flush=True)
    return found


def adapted(base, *, seed):
    """Returns the weights of a LoRA on all linear modules of the layers, after some steps on a frozen base."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ringmaster.techniques import Adapter
    from ringmaster.techniques.models.adapters import attach, trained_names

    model = LlamaForCausalLM(LlamaConfig(vocab_size=2048, num_key_value_heads=4, **SIZES))
    model.load_state_dict(base)
    attach(model, Adapter(rank=RANK), seed=seed)
    names = trained_names(model)
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if name in names], lr=LR)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        ids = torch.randint(0, 2048, (ROWS, SEQ_LEN), generator=draw).sort(dim=1).values
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items() if name in names}


def _restoring(store, ids, out):
    """Returns the wall and CPU seconds to restore all of some models; medians of ROUNDS."""
    seconds = []
    for _ in range(ROUNDS):
        shutil.rmtree(out, ignore_errors=True)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for id in ids:
            store.restore(id, out / id)
        seconds.append((time.perf_counter() - began_s, time.process_time() - began_cpu_s))
    wall_s, cpu_s = (statistics.median(each) for each in zip(*seconds, strict=True))
    return {"wall_s": wall_s, "cpu_s": cpu_s}


def _size(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def adapter_lines(found):
    """Returns the table of the adapters."""
    base, own, stored = found["base_bytes"], found["own_bytes"], found["stored_bytes"]
    separate, added = found["separate_bytes"], stored - found["base_stored_bytes"]
    rates = {
        "the base": (base, found["restore_base"]),
        f"the {NUM_ADAPTERS} adapters, one after another": (own, found["restore_adapters"]),
    }
    return [
        f"{stamp()} A Llama of 5 M parameters in fp32 and {NUM_ADAPTERS} LoRAs of rank {RANK} on all linear modules "
        f"of its layers, {STEPS} steps of training each.",
        "",
        "| what | MB | over the store |",
        "| --- | ---: | ---: |",
        f"| the store, with the base and all adapters | {stored / 1e6:.2f} | 1.00 |",
        f"| ... of which the adapters | {added / 1e6:.2f} | {added / stored:.2f} |",
        f"| the adapters' own files | {own / 1e6:.2f} | {own / stored:.2f} |",
        f"| the base's file and theirs | {(base + own) / 1e6:.2f} | {(base + own) / stored:.2f} |",
        f"| a copy of the base with each adapter's file | {separate / 1e6:.2f} | {separate / stored:.2f} |",
        "",
        f"Restored, of the plain files' bytes; medians of {ROUNDS}.",
        "",
        "| what | MB/s | a second of the processor |",
        "| --- | ---: | ---: |",
        *(
            f"| {what} | {size / 1e6 / took['wall_s']:.0f} | {size / 1e6 / took['cpu_s']:.0f} |"
            for what, (size, took) in rates.items()
        ),
    ]
