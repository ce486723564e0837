"""What inference engines refuse of an adapter, or read wrongly without a word.

Sources: vLLM's vllm/lora/peft_helper.py, vllm/config/lora.py and supported modules; Ollama's docs/import.md, and the
architectures that its own engine runs, which loads no adapters; llama.cpp's src/llama-adapter.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ringmaster.errors import InputError, raise_faults
from ringmaster.techniques.models.model_folders import tensors_in
from ringmaster.techniques.models.peft_format import (
    ADAPTER_WEIGHTS,
    FOREIGN,
    MAGNITUDE,
    is_adapter,
    parameter_name,
    read_config,
)

VLLM, OLLAMA = "vllm", "ollama"
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of `--max-lora-rank`, of which 16 is the default."""
LINEAR = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
VLLM_MODULES = LINEAR | {"embed_tokens", "lm_head"}
"""The modules of Llamas, Qwens and Gemmas that an adapter may change."""
NO_ADAPTERS_IN_OLLAMA = frozenset({"qwen3", "gemma3_text"})
"""Types of models that Ollama's own engine runs: "loras are not yet implemented"."""


def checked_adapter(folder: Path, *, engine: str, model_type: str = "") -> Mapping[str, Any]:
    """Returns the config of the adapter in a folder. Raises InputError with all that an engine refuses of it."""
    if not is_adapter(folder):
        text = f"{folder} is a whole model, and the layout {engine} is of adapters"
        raise InputError([f"{text}. To fix: leave out --format: {engine} reads such a folder as it is"])
    config = read_config(folder)
    shapes = {name: shape for name, (_, shape) in tensors_in(folder / ADAPTER_WEIGHTS).items()}
    raise_faults([*engine_faults(engine, config, shapes, model_type=model_type)])
    return config


def engine_faults(
    engine: str, config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], *, model_type: str
) -> Iterator[str]:
    """Yields what an engine refuses of an adapter, each with a remedy.

    Args:
        engine: `VLLM` or `OLLAMA`.
        config: the content of adapter_config.json.
        tensors: the shapes of its tensors, under peft's names.
        model_type: of its base; "" where it is not known.
    """
    merge = "To fix: ringmaster export --merge, which makes one model of it and its base"
    if (kind := config.get("peft_type")) != "LORA":
        yield f"{engine} loads LoRAs, and this is a {kind}. {merge if kind == 'IA3' else 'To fix: train a LoRA'}"
        return
    for key, kind in (("r", int), ("lora_alpha", (int, float))):
        if not isinstance(value := config.get(key), kind) or isinstance(value, bool) or (key == "r" and value < 1):
            yield f"adapter_config.json has {key}: {json.dumps(value)}. To fix: save the adapter again"
    if saved := config.get("modules_to_save"):
        yield f"{engine} loads no modules that were trained whole: {', '.join(saved)}. {merge}"
    if config.get("use_dora") or any(name.endswith(MAGNITUDE) for name in tensors):
        yield f"{engine} loads no DoRA. {merge}"
    if config.get("fan_in_fan_out"):
        yield f"{engine} loads no adapter of layers whose weights are transposed (fan_in_fan_out). {merge}"
    for key, harmless in FOREIGN.items():
        if key != "init_lora_weights" and config.get(key) not in harmless:
            yield f"{engine} does not read {key}, and would compute another model. {merge}"
    modules = {parameter_name(name).partition(".lora_")[0].rpartition(".")[2] for name in tensors if ".lora_" in name}
    allowed = VLLM_MODULES if engine == VLLM else LINEAR
    if unknown := sorted(modules - allowed):
        yield f"{engine} loads no adapter of {', '.join(unknown)}, but of {', '.join(sorted(allowed))}. {merge}"
    rank = config.get("r")
    if engine == VLLM and isinstance(rank, int) and rank > VLLM_RANKS[-1]:
        yield f"vllm loads ranks up to {VLLM_RANKS[-1]}, and this one is {rank}. {merge}"
    if engine == OLLAMA and model_type in NO_ADAPTERS_IN_OLLAMA:
        yield f"ollama loads no adapters of a {model_type}. {merge}, and then --format ollama"


def vllm_rank(rank: int) -> int:
    """Returns the value of `--max-lora-rank` that holds a rank, which is not above the largest."""
    return next(each for each in VLLM_RANKS if each >= rank)
