"""Loops of tinker-cookbook, unedited but for their data, in the environment of the client: `... LOOP BASE FOLDER`."""

import asyncio
import json
import sys
from pathlib import Path

import datasets
from tinker_cookbook import tokenizer_utils
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.recipes import rl_loop
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from transformers import AutoTokenizer

MODEL, RENDERER = "Qwen/Qwen3-8B", "qwen3"  # the name by which the recipes choose a renderer
NUM_ROWS = 8


def common(batch_size=4):
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=MODEL, renderer_name=RENDERER, max_length=256, batch_size=batch_size
    )


def written(folder, rows):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def message(role, text):
    return {"role": role, "content": text}


def supervised(folder):
    rows = [{"messages": [message("user", f"say {i}"), message("assistant", "e" * 9)]} for i in range(NUM_ROWS)]
    config = train.Config(
        log_path=str(folder / "log"),
        model_name=MODEL,
        recipe_name="supervised",
        renderer_name=RENDERER,
        dataset_builder=FromConversationFileBuilder(common_config=common(), file_path=written(folder, rows)),
        learning_rate=1e-2,
        num_epochs=3,
        lora_rank=4,
        save_every=2,
        eval_every=0,
    )
    asyncio.run(train.main(config))


def preference(folder):
    rows = [
        {
            "comparison": {
                "prompt_conversation": [message("user", f"say {i}")],
                "completion_A": [message("assistant", "yes")],
                "completion_B": [message("assistant", "no")],
            },
            "label": "A",
        }
        for i in range(NUM_ROWS)
    ]
    comparisons = ComparisonBuilderFromJsonl(train_path=written(folder, rows))
    config = train_dpo.Config(
        log_path=str(folder / "log"),
        model_name=MODEL,
        recipe_name="preference",
        renderer_name=RENDERER,
        dataset_builder=DPODatasetBuilderFromComparisons(common_config=common(), comparison_builder=comparisons),
        learning_rate=1e-3,
        lora_rank=4,
        save_every=0,
        eval_every=0,
    )
    train_dpo.main(config)


def reinforcement(folder):
    rows = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(NUM_ROWS)]
    data = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})
    datasets.load_dataset = lambda *_: data  # the hub's
    rl_loop.get_reward = lambda response, answer: sum(map(str.islower, response)) / 8  # answers are beyond a tiny model
    config = rl_loop.Config(
        log_path=str(folder / "log"),
        model_name=MODEL,
        batch_size=4,
        group_size=4,
        learning_rate=1e-2,
        lora_rank=4,
        max_tokens=8,
        save_every=0,
    )
    rl_loop.main(config)


if __name__ == "__main__":
    loop, base, folder = sys.argv[1:]
    tokenizer_utils.register_tokenizer(MODEL, lambda: AutoTokenizer.from_pretrained(base))
    {"supervised": supervised, "preference": preference, "reinforcement": reinforcement}[loop](Path(folder))
