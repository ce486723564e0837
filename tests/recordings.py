"""Tiny recordings with their texts: each letter is a tone, so that a model can learn to write them."""

import json
from dataclasses import replace

import numpy as np
import pytest

from ringmaster.techniques import DataSpec

soundfile = pytest.importorskip("soundfile", reason="no soundfile, which reads recordings")

RATE, LETTERS = 16_000, "abcd"


def tones(text, *, rate=RATE, letter_s=0.0401):
    """The samples of a text, with a little noise."""
    times = np.arange(int(letter_s * rate)) / rate
    parts = [0.4 * np.sin(2 * np.pi * (250 + 90 * (ord(each) - 96)) * times) * (each != " ") for each in text]
    noise = np.random.default_rng(len(text)).normal(0, 0.01, len(times) * len(text))
    return (np.concatenate(parts) + noise).astype(np.float32)


def texts(number):
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice([*LETTERS], size=draw.integers(2, 4))) for _ in range(3 * number)]
    return [" ".join(words[3 * i : 3 * i + draw.integers(1, 4)]) for i in range(number)]


def write_recordings(folder, *, number=40, rate=RATE):
    """Writes WAV and FLAC files in turn, and a table with their names and texts; returns the table's path."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for place, text in enumerate(texts(number)):
        name = f"{place}.{('wav', 'flac')[place % 2]}"
        soundfile.write(folder / name, tones(text, rate=rate), rate)
        rows.append({"audio": name, "text": text})
    return write_table(folder / "rows.jsonl", rows)


def write_table(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def ctc_processor(folder, *, has_mask=True):
    """Saves a tokenizer of letters and a feature extractor; returns the processor of both."""
    from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2Processor

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = folder / "vocab.json"
    vocabulary.write_text(json.dumps({each: i for i, each in enumerate(["<pad>", "<unk>", "|", *LETTERS])}))
    tokenizer = Wav2Vec2CTCTokenizer(str(vocabulary), pad_token="<pad>", bos_token=None, eos_token=None)
    tokenizer.save_pretrained(folder)
    extractor = Wav2Vec2FeatureExtractor(return_attention_mask=has_mask)
    extractor.save_pretrained(folder)
    return Wav2Vec2Processor(extractor, tokenizer)


def spec_of(table, processor, **changes):
    """The spec of a table whose recordings are read by the processor in a folder; all rows are trained on."""
    plain = DataSpec(kind="speech-text", path=str(table), tokenizer=str(processor), held_out=0.0)
    return replace(plain, **changes)


def whisper_processor(folder):
    """Saves a tokenizer of letters and a feature extractor of one second; returns the processor of both."""
    from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|hi|>", "<|transcribe|>", "<|translate|>"]
    special += ["<|notimestamps|>"]
    letters = [*LETTERS, "Ġ"]
    vocabulary = {each: place for place, each in enumerate([*letters, "ab", "cd"])}
    tokenizer = WhisperTokenizer(vocab=vocabulary, merges=[("a", "b"), ("c", "d")], pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    tokenizer.set_prefix_tokens(language="en", task="transcribe")
    tokenizer.save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    extractor.save_pretrained(folder)
    return WhisperProcessor(extractor, tokenizer)
