"""What tests of losses on a model's own completions share: a model, an adapter, and data that consists of prompts."""

import json
from dataclasses import replace

from ringmaster.features.on_policy.rollout import prompts_of
from ringmaster.techniques import Adapter, DataSpec
from ringmaster.techniques.data import open_data, prepare
from ringmaster.techniques.data.samples import Sampler
from tests.integration.workbench import LLAMA

MODEL = replace(LLAMA, config={**LLAMA.config, "vocab_size": 320})
LORA = Adapter(kind="lora", rank=4, alpha=8)


def prompt_data(folder, rows):
    """Writes rows with prompts into a folder, and returns the data."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSpec(path=str(file), kind="prompt", vocab_size=300, held_out=0.2)


def repeated_text(i):
    """The text of a prompt, which depends on its number, in length too."""
    return f"say {'ab'[i % 2] * (1 + i % 5)}"


def rows_of_steps(bench, data, *, num_steps, num_prompts, seed):
    """Returns the prepared data, its tokenizer, and the rows of its prompts in the order in which a job reads them."""
    from transformers import AutoTokenizer

    prepared = prepare(data, cache_dir=bench.cache_dir)
    training, _ = open_data(data, cache_dir=bench.cache_dir, prepared=prepared)
    sampler = Sampler(num_samples=len(training), global_batch_size=num_prompts, seed=seed)
    order = [int(i) for step in range(num_steps) for i in sampler.indices(step)]
    tokenizer = AutoTokenizer.from_pretrained(str(prepared.tokenizer_dir), local_files_only=True)
    return prepared, tokenizer, prompts_of(training.rows(order))
