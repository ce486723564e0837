"""Reads audio files as one channel of samples, at the rate that a model reads."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from ringmaster.extras import require_extra
from ringmaster.techniques.data.arrow_files import Array
from ringmaster.techniques.data.file_patterns import opened

FORMATS = ("WAV", "WAVEX", "RF64", "FLAC")
"""The formats that are read, by libsndfile's names."""
REMEDY = "To fix: replace the file, or remove the row"
MIN_RATE, MAX_RATE = 1_000, 1_000_000
"""Samples a second, below and above which a file's header is taken to be wrong."""
UNKNOWN_SIZES = (0, 0x7FFFFFFF, 0xFFFFFFFF)
"""Sizes of a WAV file's samples from programs that wrote into a pipe, and did not know the end."""
MAX_UNKNOWN_SIZE = 0x7FFFF000
"""From here on, a size is that of a pipe, too, or of a file that WAV cannot hold."""


def read_audio(value: Any, *, rate: int, max_seconds: float = math.inf) -> Array:
    """Returns the samples of an audio file at `rate` samples a second, in fp32: [samples].

    Channels are averaged. Another rate becomes the wanted one by `scipy.signal.resample_poly`: a polyphase filter with
    a Kaiser window of beta 5, which removes what the lower rate cannot hold.

    value: a path or URL, the bytes of a file, a mapping of one of these as Hugging Face's `Audio` stores it ("bytes",
        "path"), or a mapping of decoded samples ("array", "sampling_rate").

    Raises ValueError where it cannot be read, is empty, is longer than `max_seconds`, or has samples that are not
    finite.
    """
    samples, own_rate = _decoded(value, max_seconds)
    if samples.ndim == 2:
        samples = samples.mean(axis=1, dtype=np.float32)
    if not len(samples):
        raise ValueError(f"the audio is empty. {REMEDY}")
    _check_length(len(samples), own_rate, max_seconds)
    if not (is_finite := np.isfinite(samples)).all():
        raise ValueError(f"the audio has {len(samples) - is_finite.sum():,} samples that are not finite. {REMEDY}")
    return samples if own_rate == rate else resampled(samples, own_rate, rate)


def resampled(samples: Array, own_rate: int, rate: int) -> Array:
    """Returns samples [samples] of one rate at another one, in fp32; see `read_audio`."""
    from scipy.signal import resample_poly  # type: ignore[import-untyped]

    common = math.gcd(own_rate, rate)
    return np.asarray(resample_poly(samples, rate // common, own_rate // common), np.float32)


def _decoded(value: Any, max_seconds: float) -> tuple[Array, int]:
    """The samples of an audio value, [samples] or [samples, channels], and their rate."""
    if isinstance(value, Mapping) and value.get("array") is not None:
        samples, own_rate = np.asarray(value["array"], np.float32), value.get("sampling_rate")
        if not isinstance(own_rate, int) or samples.ndim != 1:
            raise ValueError("the decoded audio is not samples [samples] with a sampling_rate. To fix: give files")
        return samples, _checked_rate(own_rate)
    if isinstance(value, Mapping):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes):
        return _read(io.BytesIO(value), max_seconds)
    if not isinstance(value, str):
        what = "missing" if value is None else f"{type(value).__name__}"
        raise ValueError(f"the audio is {what}. To fix: give the path of its file, or its bytes")
    with opened(value) as stream:
        return _read(stream, max_seconds)


def _read(stream: BinaryIO, max_seconds: float) -> tuple[Array, int]:
    require_extra("speech", feature="data of speech")
    import soundfile

    if not (begin := stream.read(12)):
        raise ValueError(f"the audio file is empty. {REMEDY}")
    stream.seek(0)
    if begin[:4] == b"RIFF" and (missing := _num_missing_bytes(stream)):
        raise ValueError(f"the audio file is cut off: {missing:,} bytes of its samples are missing. {REMEDY}")
    stream.seek(0)
    try:
        with soundfile.SoundFile(stream) as file:
            if file.format not in FORMATS:
                raise ValueError(
                    f"the audio file is {file.format}, and WAV and FLAC are read. To fix: convert it, e.g. "
                    "ffmpeg -i IN OUT.flac"
                )
            own_rate, num_samples = _checked_rate(file.samplerate), file.frames
            _check_length(num_samples, own_rate, max_seconds)
            samples = file.read(dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError, EOFError, struct.error) as error:
        raise ValueError(f"the audio file cannot be read: {' '.join(str(error).split()):.200} {REMEDY}") from error
    if len(samples) != num_samples:
        raise ValueError(f"the audio file is cut off: it has {len(samples):,} of {num_samples:,} samples. {REMEDY}")
    return samples, own_rate


def _num_missing_bytes(stream: BinaryIO) -> int:
    """How many bytes a WAV file has less than its header says; libsndfile reads such a file up to its end."""
    size = stream.seek(0, io.SEEK_END)
    place = 12
    while place + 8 <= size:
        stream.seek(place)
        name, length = struct.unpack("<4sI", stream.read(8))
        place += 8
        if name == b"data":
            is_unknown = length in UNKNOWN_SIZES or length >= MAX_UNKNOWN_SIZE
            return 0 if is_unknown else max(place + length - size, 0)
        place += length + length % 2
    return 0


def _checked_rate(rate: int) -> int:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ValueError(f"the audio has {rate:,} samples a second, which no recording has. {REMEDY}")
    return rate


def _check_length(num_samples: int, rate: int, max_seconds: float) -> None:
    if num_samples > max_seconds * rate:
        raise ValueError(
            f"the audio has {num_samples / rate:.1f} s, and at most {max_seconds:g} s are read. To fix: divide it with "
            "its text, raise data.max_seconds where the model reads more, or remove the row"
        )
