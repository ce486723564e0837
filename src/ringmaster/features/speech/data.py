"""Speech with its text: the inputs that a feature extractor of transformers makes of audio, and the text's tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from ringmaster.extras import require_extra
from ringmaster.features.speech.audio import read_audio
from ringmaster.techniques.data.arrow_files import LABELS, SPLITS, Array, columns_in, split_file
from ringmaster.techniques.data.image_processors import digest_of, processor_files
from ringmaster.techniques.data.row_source import RowSource, SampleContext, text_of
from ringmaster.techniques.data_source import DataOptions, PreparedData, SampleTensor, column
from ringmaster.techniques.job_features import Description, Positive
from ringmaster.techniques.job_specs import DataSpec

WAVE, FEATURES = "input_values", "input_features"
START = "<|startoftranscript|>"
"""The token that Whisper's decoder begins with, which the model itself puts before the labels."""
REMEDY = (
    "To fix: set data.tokenizer, or data.processor, to a folder or hub name with a preprocessor_config.json of "
    "a model such as Whisper, Wav2Vec2 or HuBERT"
)


@dataclass(frozen=True, kw_only=True)
class SpeechOptions(DataOptions):
    """The columns of audio and of its text, and how audio is read; see `SpeechText`.

    frames: of the model's convolutions that make frames of samples, the width and the step of each: [[10, 5], ...].
    """

    audio_column: Annotated[str | None, Description("the column that holds the path of a recording, such as file")] = (
        column("audio", "file", "path", "file_name", "audio_path")
    )
    text_column: str | None = column("text", "sentence", "transcription", "transcript")
    processor: Annotated[
        str | None,
        Description("a folder or hub name with the image processor or feature extractor, by default data.tokenizer's"),
    ] = None
    max_seconds: Annotated[Positive, Description("the longest recording that is read, such as 20")] = 30.0
    language: Annotated[str | None, Description("the language that Whisper's texts are marked with, such as hi")] = None
    task: Annotated[str | None, Description("the task that Whisper's texts are marked with, such as transcribe")] = None
    frames: Any = ()

    @cached_property
    def extractor(self) -> FeatureExtractor:
        """The feature extractor. Raises ValueError where it cannot be loaded here."""
        return FeatureExtractor(str(self.processor))


class FeatureExtractor:
    """A feature extractor of transformers, which is called with one recording at a time.

    Attributes:
        rate: the samples a second that it reads.
        max_samples: the most samples that it does not cut off; None where it reads any number.
    """

    def __init__(self, name: str) -> None:
        from transformers import AutoFeatureExtractor

        try:
            self._extractor: Any = AutoFeatureExtractor.from_pretrained(name, trust_remote_code=False)
        except (ImportError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason, _, _ = " ".join(str(error).split()).partition(". ")
            raise ValueError(f"processor {name!r} cannot be loaded: {reason:.240}. {REMEDY}") from error
        self.rate = int(getattr(self._extractor, "sampling_rate", None) or 0)
        self.max_samples: int | None = getattr(self._extractor, "n_samples", None)
        inputs = {*getattr(self._extractor, "model_input_names", ())}
        if not self.rate or not inputs & {WAVE, FEATURES}:
            raise ValueError(f"processor {name!r} is {type(self._extractor).__name__}, which reads no audio. {REMEDY}")
        shapes = (
            {self(np.zeros(seconds * self.rate, np.float32))[FEATURES].shape for seconds in (1, 2)}
            if (WAVE not in inputs)
            else set()
        )
        if len(shapes) > 1:
            raise ValueError(
                f"processor {name!r} ({type(self._extractor).__name__}) makes features of any length, which are not "
                f"read. {REMEDY}"
            )

    def __call__(self, samples: Array) -> dict[str, Array]:
        """Returns what it makes of the samples of a recording, by the names of the model's inputs."""
        result = self._extractor(samples, sampling_rate=self.rate, return_tensors="np")
        return {name: np.asarray(values)[0] for name, values in result.items()}


class SpeechText(RowSource):
    """What a model reads of a recording, and the tokens of its text as labels.

    A row names the file of its audio, relative to the table, or has its bytes, as Hugging Face's `Audio`. Models such
    as Wav2Vec2 read samples, [samples], which are padded when a batch is made; Whisper reads features of 30 s,
    [mels, frames]. Texts are encoded as targets, with the special tokens of these, and are never cut.
    """

    name = "speech-text"
    options_class: ClassVar[type[DataOptions]] = SpeechOptions
    needs_tokenizer = True
    encodes_texts = False
    has_targets = True
    copies_labels = False
    cuts = False
    rounds_width = False
    keeps_files = False  # recordings are files of their own
    file_role: ClassVar[str] = "audio"
    rows_at_once: ClassVar[int] = 32  # a row of Whisper's features has a megabyte
    padding: ClassVar[Mapping[str, int]] = {**RowSource.padding, WAVE: 0}
    uncut: ClassVar[frozenset[str]] = frozenset({LABELS})

    def check(self, spec: DataSpec) -> None:
        """Refuses options that are wrong, and data without a processor or without the package that reads audio."""
        super().check(spec)
        how = self.options(spec)
        if how.processor is None:
            raise ValueError(f"data: kind {self.name} has no processor, which says how audio is read. {REMEDY}")
        if not isinstance(how.max_seconds, (int, float)) or not 0 < how.max_seconds < np.inf:
            raise ValueError(f"data: max_seconds {how.max_seconds!r} is no number of seconds. To fix: give one above 0")
        require_extra("speech", feature="data of speech")

    def options(self, spec: DataSpec) -> SpeechOptions:
        """Returns the options, with the folder of the tokenizer as that of the processor where none is named."""
        result: SpeechOptions = super().options(spec)
        return result if result.processor is not None else replace(result, processor=spec.tokenizer)

    def origin(self, spec: DataSpec) -> tuple[str, Any]:
        """Returns where the rows come from, and what changes as soon as they do, or the processor."""
        location, state = super().origin(spec)
        return location, {**state, "processor": digest_of(processor_files(str(self.options(spec).processor)))}

    def write(self, folder: Path, spec: DataSpec, *, where: str, cache_dir: Path) -> PreparedData:
        """Writes the samples, and the files of the processor that makes them, as they are."""
        how = self.options(spec)
        _ = how.extractor  # what cannot be loaded is refused once, and not with each row
        (folder / "processor").mkdir()
        for name, content in processor_files(str(how.processor)).items():
            (folder / "processor" / name).write_bytes(content)
        spec = replace(spec, tokenizer=spec.tokenizer or how.processor)
        prepared = super().write(folder, spec, where=where, cache_dir=cache_dir)
        labels = SampleTensor(name=LABELS, dtype="int64", shape=(_longest(folder, LABELS),))
        return replace(prepared, kind="other", tensors=(*prepared.tensors, labels))

    def set_up_tokenizer(self, tokenizer: Any, *, options: Any) -> None:
        """Sets the language and the task that targets begin with, in the tokenizer of a Whisper."""
        given = {name: value for name in ("language", "task") if (value := getattr(options, name)) is not None}
        if not given:
            return
        if not hasattr(tokenizer, "set_prefix_tokens"):
            raise ValueError(
                f"data: {type(tokenizer).__name__} marks no {' and no '.join(given)}. To fix: remove "
                f"{', '.join(given)} from data"
            )
        tokenizer.set_prefix_tokens(**given)

    def texts(self, row: Mapping[str, Any], *, context: SampleContext) -> Iterable[str]:
        """Returns the text."""
        return (row["text"],)

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns what the feature extractor makes of the audio, and the tokens of the text.

        Raises ValueError where the audio cannot be read whole, or the text not be learnt from it whole.
        """
        how: SpeechOptions = context.options
        labels = _labels(text_of(row, "text"), context)
        samples = self._audio(row, how)
        if how.frames:
            _check_frames(len(samples), labels, how.frames)
        return {**how.extractor(samples), LABELS: labels}

    def reference(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any] | None:
        """Returns what the feature extractor, loaded again, makes of the audio, and the tokenizer's of the text."""
        how: SpeechOptions = context.options
        inputs = FeatureExtractor(str(how.processor))(self._audio(row, how))
        tokens = context.tokenizer.own_call(row["text"])
        return inputs if tokens is None else {**inputs, LABELS: _without_start(tokens["input_ids"], context)}

    def _audio(self, row: Mapping[str, Any], how: SpeechOptions) -> Array:
        extractor = how.extractor
        limit = how.max_seconds
        if extractor.max_samples is not None:
            limit = min(limit, extractor.max_samples / extractor.rate)
        return read_audio(row["audio"], rate=extractor.rate, max_seconds=limit)


def _longest(folder: Path, name: str) -> int:
    """The length of the longest row of a ragged column, of both splits."""
    rows = (each for split in SPLITS for each in columns_in(split_file(folder, split), name))
    return max((int(lengths.max(initial=0)) for _, lengths in rows if lengths is not None), default=0)


def _labels(text: str, context: SampleContext) -> list[int]:
    """The tokens of a text. Raises ValueError where some are unknown, or where they are too many."""
    tokenizer = context.tokenizer
    tokens = tokenizer.target(text, at_most=len(text) * 8 + 16)
    if (unknown := tokenizer.unknown_content_id) is not None and unknown in tokens:
        characters = "".join(each for each in dict.fromkeys(text) if unknown in tokenizer.target(each, at_most=16))
        cased = next((way for way in ("upper", "lower") if unknown not in _changed(text, way, context)), None)
        remedy = f"write texts in {cased} case" if cased else "remove these characters, or set another data.tokenizer"
        raise ValueError(f"the text has {characters!a:.80}, which the tokenizer does not know. To fix: {remedy}")
    result = _without_start(tokens, context)
    if len(result) > context.max_length:
        raise ValueError(
            f"the text has {len(result):,} tokens, and texts are not cut at {context.max_length:,}. To fix: divide the "
            "recording with its text, raise data.seq_len where the model has the positions, or remove the row"
        )
    return result


def _changed(text: str, way: str, context: SampleContext) -> list[int]:
    changed = text.upper() if way == "upper" else text.lower()
    return context.tokenizer.target(changed, at_most=len(changed) * 8 + 16)


def _without_start(tokens: Sequence[int], context: SampleContext) -> list[int]:
    """Tokens without the one that the decoder begins with, which the model puts before the labels."""
    return [*tokens[context.tokenizer.is_token(tokens[0], START) :]] if tokens else []


def num_frames(num_samples: int, frames: Sequence[Sequence[int]]) -> int:
    """Returns the number of frames that convolutions of some widths and steps make of samples."""
    for width, step in frames:
        num_samples = (num_samples - width) // step + 1
    return max(num_samples, 0)


def _check_frames(num_samples: int, labels: Sequence[int], frames: Sequence[Sequence[int]]) -> None:
    """Raises ValueError where a CTC model cannot write the labels in the frames of a recording.

    Each label needs a frame, and one more for the blank where the one before is equal (Graves et al., Connectionist
    Temporal Classification, ICML 2006).
    """
    there, needed = num_frames(num_samples, frames), len(labels) + sum(a == b for a, b in pairwise(labels))
    if there < needed or not there:
        raise ValueError(
            f"the audio has {there:,} frames, and its text needs {needed:,}: one for each of {len(labels):,} tokens, "
            "and one between equal ones. To fix: check whether the text is that of the recording, or remove the row"
        )
