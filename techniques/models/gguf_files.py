"""GGUF files, the format of llama.cpp, as folders of safetensors that transformers loads."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ringmaster.extras import require_extra

GGUF = ".gguf"


@contextmanager
def converted_gguf(file: Path) -> Iterator[Path]:
    """Yields a folder with the model of a GGUF file: its config, its tokenizer, and its weights in fp32.

    Quantized weights become the numbers that they stand for. Raises ValueError where the extra `gguf` is not installed,
    or transformers does not know the file's architecture.
    """
    require_extra("gguf", feature=f"the GGUF file {file}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        try:
            model = AutoModelForCausalLM.from_pretrained(
                str(file.parent), gguf_file=file.name, local_files_only=True, dtype=torch.float32
            )
            # Its weights are plain numbers now, which transformers refuses to save while they count as quantized.
            model.hf_quantizer = None
            vars(model.config).pop("quantization_config", None)
            model.save_pretrained(folder)
            tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
            tokenizer.save_pretrained(folder)
        except Exception as error:
            why = " ".join(str(error).split())[:300] or type(error).__name__
            raise ValueError(
                f"{file} cannot be read as a GGUF file: {why}. To fix: download it again, or name a model's folder"
            ) from error
        yield Path(folder)
