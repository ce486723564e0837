"""Embeddings of sequences as Sentence-Transformers computes them: the modules of a base, pooling and normalization.

The folder of such a model lists its modules in `modules.json`: a transformer, a pooling of its hidden states and
perhaps a normalization. Losses and metrics of embeddings follow them, and exports keep their files. No module of torch
is imported on import.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.model_facts import num_positions
from ringmaster.techniques.models.model_folders import CONFIG, TOKENIZER_CONFIG, config_in, read_json

if TYPE_CHECKING:
    from torch import Tensor

MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
FILES = (MODULES, SETTINGS, "sentence_*_config.json", "[0-9]_*/*")
"""Patterns of the files other than those of the transformer."""
TRANSFORMER_SETTINGS = "sentence_{}_config.json"
TRANSFORMER_NAMES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
"""The file of the settings of a transformer, and the names in it, of which the first that is there counts."""
LENGTH_KEY, LOWER_CASE_KEY = "max_seq_length", "do_lower_case"
LENGTH_UNLIMITED = 10**9
"""Tokenizers without a limit name a larger one."""

FORMER_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The modes by the keys of Sentence-Transformers up to release 5, in the order in which they are joined."""
MODES = tuple(FORMER_MODES.values())


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """How the embedding of a sequence is made of its hidden states.

    modes: of `MODES`, whose results are joined.
    is_normalized: whether embeddings are divided by their length, so that products are cosines.
    """

    modes: tuple[str, ...] = ("mean",)
    is_normalized: bool = True


@cache
def pooling_of(base: str | None) -> Pooling:
    """Returns the pooling of a base, a folder or a name on the hub; the normalized mean where it does not define one.

    Embeddings that the base does not normalize are compared as it defines: by cosine, or by their product ("dot").

    Raises ValueError, with a remedy, where it has other modules than can be trained, or compares in another way.
    """
    folder = None if base is None else local_folder(base)
    if folder is None or not (folder / MODULES).is_file():
        return Pooling()
    kinds = _modules(folder)
    if foreign := [name for name in kinds if name not in ("Transformer", "Pooling", "Normalize")]:
        raise ValueError(
            f"model: {base} has the Sentence-Transformers module {foreign[0]}, which is not trained here. To fix: give "
            "a base of a Transformer with Pooling and Normalize; or the transformer alone, without modules.json"
        )
    config = _read(kinds["Pooling"] / "config.json") if "Pooling" in kinds else {}
    named = config.get("pooling_mode", [mode for key, mode in FORMER_MODES.items() if config.get(key)] or "mean")
    modes = (named,) if isinstance(named, str) else tuple(named)
    settings = _read(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    similarity, prompt = settings.get("similarity_fn_name") or "cosine", settings.get("default_prompt_name")
    faults = [f"pools by {mode}, which is none of {', '.join(MODES)}" for mode in modes if mode not in MODES]
    if similarity not in ("cosine", "dot"):
        faults.append(f"compares embeddings by {similarity}, and they are trained by cosine or dot")
    if prompt and settings.get("prompts", {}).get(prompt):
        faults.append(f"puts the prompt {prompt!r} before each text, which training does not (default_prompt_name)")
    transformer = kinds.get("Transformer", folder)
    if _transformer_settings(transformer)[1].get(LOWER_CASE_KEY) and not _lower_cases(transformer):
        faults.append(f"lower-cases texts before its tokenizer reads them, which training does not ({LOWER_CASE_KEY})")
    if faults:
        raise ValueError(f"model: {base} {'; and it '.join(faults)}. To fix: change this in its folder")
    return Pooling(modes=modes, is_normalized="Normalize" in kinds or similarity == "cosine")


def max_length_of(base: str) -> int | None:
    """Returns the most tokens of a text that Sentence-Transformers reads with a base, a folder or a name on the hub.

    None where the base has no modules, or no limit.
    """
    from huggingface_hub.errors import HfHubHTTPError

    try:
        folder = local_folder(base, patterns=(*FILES, CONFIG, TOKENIZER_CONFIG))
    except (OSError, ValueError, HfHubHTTPError):  # nothing is there: loading the tokenizer reports that
        return None
    if not (folder / MODULES).is_file():
        return None
    transformer = _modules(folder).get("Transformer", folder)
    settings = _transformer_settings(transformer)[1]
    of_tokenizer = settings.get("processor_kwargs") or settings.get("tokenizer_args") or {}
    if (named := of_tokenizer.get("model_max_length", settings.get(LENGTH_KEY))) is not None:
        return int(named)
    limits = (
        read_json(transformer / TOKENIZER_CONFIG).get("model_max_length"),
        num_positions(config_in(str(transformer))),
    )
    return min((int(each) for each in limits if each is not None and each < LENGTH_UNLIMITED), default=None)


def copy_modules(base: str | None, folder: Path, *, seq_len: int | None) -> None:
    """Copies the modules of a base, other than its transformer, to the folder of an export; nothing where it has none.

    seq_len: the most tokens of the texts that were trained on, which the export reads as well.
    """
    source = None if base is None else local_folder(base)
    if source is None or not (source / MODULES).is_file():
        return
    for file in (file for pattern in FILES for file in sorted(source.glob(pattern)) if file.is_file()):
        target = folder / file.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)
    most = max_length_of(str(folder))
    if seq_len is not None and most is not None and most < seq_len:
        path, settings = _transformer_settings(_modules(folder).get("Transformer", folder))
        path.write_text(json.dumps({**settings, LENGTH_KEY: seq_len}, indent=4))


def last_hidden_state(output: Any) -> Tensor | None:
    """Returns the hidden states of a model's last layer, or None where its output has none."""
    name = "last_hidden_state"
    states: Tensor | None = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return states


def embeddings(states: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Returns the embeddings of sequences, [sequences, features]. A sequence's unmasked tokens are neighbours.

    states: [sequences, tokens, features]. mask: [sequences, tokens].
    """
    import torch
    from torch.nn.functional import normalize

    rows, num_tokens = torch.arange(len(states), device=states.device), states.shape[1]
    weights = mask.to(states.dtype).unsqueeze(-1)
    totals = weights.sum(1).clamp(min=1e-9)
    parts = []
    for mode in pooling.modes:
        if mode == "cls":
            parts.append(states[rows, mask.int().argmax(1)])
        elif mode == "lasttoken":
            parts.append(states[rows, num_tokens - 1 - mask.int().flip(1).argmax(1)])
        elif mode == "max":
            parts.append(states.masked_fill(weights == 0, -torch.inf).amax(1))
        elif mode == "weightedmean":
            places = weights.cumsum(1) * weights
            parts.append((states * places).sum(1) / places.sum(1).clamp(min=1e-9))
        else:
            parts.append((states * weights).sum(1) / (totals if mode == "mean" else totals.sqrt()))
    joined = torch.cat(parts, dim=-1)
    return normalize(joined, dim=-1) if pooling.is_normalized else joined


def local_folder(base: str, *, patterns: Sequence[str] = FILES) -> Path:
    """Returns the folder of a base; of a name on the hub, that of the files that match some patterns, in its cache."""
    if Path(base).is_dir():
        return Path(base)
    from huggingface_hub import snapshot_download

    # The base itself was loaded from the hub, so that this is in its cache, or can be.
    return Path(snapshot_download(base, allow_patterns=list(patterns)))


def _modules(folder: Path) -> dict[str, Path]:
    """Returns the folder of each module of a base, by the name of its class; of a foreign class by its whole path."""
    return {
        each["type"].rpartition(".")[2] if each["type"].startswith("sentence_transformers.") else each["type"]: (
            folder / each["path"]
        )
        for each in _read(folder / MODULES)
    }


def _transformer_settings(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the file of a transformer's settings, and its content; {} where there is none."""
    files = [folder / TRANSFORMER_SETTINGS.format(name) for name in TRANSFORMER_NAMES]
    file = next((each for each in files if each.is_file()), files[0])
    return file, read_json(file)


def _lower_cases(folder: Path) -> bool:
    """Returns whether the tokenizer in a folder reads texts in lower case by itself."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    return normalizer is not None and "A" not in normalizer.normalize_str("A")


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))
