"""The tokenizer of data in its folder: loaded or trained on texts, and compared with that of another folder."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from ringmaster.techniques.data.row_files import FileText, check_tokenizer, has_tokenizer
from ringmaster.techniques.data.stored_source import TextProgress
from ringmaster.techniques.data.text_encoder import GPT2, in_pieces
from ringmaster.techniques.job_specs import DataSpec

TOKENIZER, END_OF_TEXT = "tokenizer.json", "<|endoftext|>"
# Merges hardly change beyond this much text, and training time grows with it. The document in which it is reached is
# read to its end, or to the second limit.
MAX_TRAINING_CHARACTERS = 64_000_000
MAX_CHARACTERS_OF_A_DOCUMENT = 256_000_000


def save_tokenizer(
    folder: Path,
    spec: DataSpec,
    texts: Iterable[str | FileText],
    *,
    set_up: Callable[[Any], None] = lambda _: None,
) -> None:
    """Writes the tokenizer that a spec names, or else one that is trained on texts, so that `AutoTokenizer` loads it.

    set_up: called with the tokenizer that the spec names, before it is saved.

    Raises ValueError where it cannot be loaded.
    """
    if spec.tokenizer is None:
        _train_tokenizer(folder, texts, spec.vocab_size)
    else:
        tokenizer = load_tokenizer(spec.tokenizer)
        set_up(tokenizer)
        tokenizer.save_pretrained(str(folder))


def _train_tokenizer(folder: Path, texts: Iterable[str | FileText], vocab_size: int) -> None:
    """Writes a byte-level BPE of `vocab_size`, which can encode any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size <= len(alphabet):
        raise ValueError(
            f"vocab_size {vocab_size} is too small for a byte-level BPE. To fix: give more than {len(alphabet)}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_training_pieces(texts, TextProgress("training a tokenizer")), trainer)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / TOKENIZER))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


# The time of training is quadratic in the longest word. Whitespace is a word, too.
LONG_WORD = re.compile(r"\S{1000}|\s{1000}")


def _training_pieces(texts: Iterable[str | FileText], progress: TextProgress) -> Iterator[str]:
    """The texts in pieces that have the words of the whole, up to the limits."""
    num_left = MAX_TRAINING_CHARACTERS
    for text in texts:
        num_of_this = 0
        for piece, ends in in_pieces(text, rule=GPT2):
            progress.add(len(piece), num_texts=ends)
            cuts = [0, *(match.end() for match in LONG_WORD.finditer(piece)), len(piece)]
            yield from (piece[start:end] for start, end in pairwise(cuts) if start < end)
            num_left, num_of_this = num_left - len(piece), num_of_this + len(piece)
            if num_of_this >= MAX_CHARACTERS_OF_A_DOCUMENT:
                break
        if num_left <= 0:
            return


def load_tokenizer(name: str) -> Any:
    """Returns the tokenizer in a folder, or of a name on the hub. Raises ValueError where it cannot be loaded."""
    from transformers import AutoTokenizer

    is_local = Path(name).is_dir()
    if is_local:
        check_tokenizer(Path(name))
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=is_local)
    except Exception as error:  # of a damaged file, the library raises Exception itself, and KeyError
        if needed := _missing_package(error, Path(name)):
            raise ValueError(
                f"tokenizer {name!r} cannot be loaded without the package {needed}. To fix: install it (pip install "
                f"{needed}), or give a tokenizer with a {TOKENIZER}"
            ) from error
        reason = " ".join(str(error).split()) if isinstance(error, (OSError, ValueError)) else repr(error)
        raise ValueError(
            f"tokenizer {name!r} cannot be loaded: {reason}. To fix: give a folder that save_pretrained "
            f"wrote, or a hub name, or leave it out to train one"
        ) from error


_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/=]+ \d+\s")
_NEEDED = re.compile(r"requires the (\w+) library|install (\w+) to use|`(\w+)` is required|No module named '(\w+)'")


def _missing_package(error: Exception, folder: Path) -> str | None:
    """The package whose absence is why a tokenizer cannot be loaded; None where that is not the reason.

    Where sentencepiece is missing, transformers reads its files as those of tiktoken, and reports that.
    """
    models = [file for pattern in ("*.model", "*.spm") for file in folder.glob(pattern)]
    is_known = find_spec("sentencepiece") is not None
    if not is_known and any(_TIKTOKEN.match(file.read_bytes()[:200]) is None for file in models):
        return "sentencepiece"
    match = _NEEDED.search(str(error)) if isinstance(error, (ImportError, ValueError)) else None
    name = next(filter(None, match.groups()), "") if match else ""
    return name.lower() if name and find_spec(name.lower()) is None else None


def have_other_tokens(one: Path | None, other: Path | None) -> bool:
    """Returns whether the tokenizers in two folders read texts as other numbers; False where one is not known.

    They do where a token has another number, and where texts are normalized or merged into tokens by other rules. One
    may have further tokens, which were added to it.
    """
    if one is None or other is None or not (has_tokenizer(one) and has_tokenizer(other)):
        return False
    files = [folder / TOKENIZER for folder in (one, other)]
    if not all(file.is_file() for file in files):  # as of tokenizers in Python
        try:
            return _differ(*(load_tokenizer(str(folder)).get_vocab() for folder in (one, other)))
        except ValueError:
            return False
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    models = [content.get("model", {}).get("vocab") for content in contents]
    if models[0] != models[1] or _differ(*map(_numbers, contents)):
        return True
    first, second = map(_rules, contents)
    # Releases of the library write the same rules in other ways, so that both are compared as they are loaded.
    try:
        return first != second and _loaded_rules(one) != _loaded_rules(other)
    except ValueError:
        return False


def _rules(content: Mapping[str, Any]) -> list[Any]:
    """The rules by which texts become tokens, of the content of a `tokenizer.json`."""
    return [content.get("normalizer"), content.get("model")]


def _loaded_rules(folder: Path) -> list[Any] | None:
    """The same of the tokenizer that is loaded from a folder; None where it has none, as one in Python."""
    backend = getattr(load_tokenizer(str(folder)), "backend_tokenizer", None)
    return None if backend is None else _rules(json.loads(backend.to_str()))


def _numbers(content: Mapping[str, Any]) -> dict[str, int]:
    """The number of each token, of the content of a `tokenizer.json`."""
    vocab = content.get("model", {}).get("vocab") or ()
    own = vocab if isinstance(vocab, Mapping) else {token: number for number, (token, _) in enumerate(vocab)}
    return {**own, **{token["content"]: token["id"] for token in content.get("added_tokens") or ()}}


def _differ(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether a token of both has two numbers, or a number of both is of two tokens."""
    names = {number: token for token, number in other.items()}
    return any(other.get(token, number) != number or names.get(number, token) != token for token, number in one.items())
