"""What data and models of speech are known by, and what the data determines of a Whisper's config."""

from collections.abc import Iterator
from typing import Any

from ringmaster.techniques.data_source import PreparedData

CTC_SUFFIX = "ForCTC"
"""The ending of the names of transformers' models that write a token, or none, for each frame of speech."""
WHISPER = "whisper"


def whisper_fields(config: Any, data: PreparedData) -> Iterator[tuple[str, Any]]:
    """Yields the token that a Whisper's decoder begins with."""
    if config.model_type == WHISPER and data.empty_target:
        yield "decoder_start_token_id", data.empty_target[0]


INFERRED_KINDS = (("speech-text", (CTC_SUFFIX, "WhisperForConditionalGeneration")),)
CONFIG_FIELDS = (whisper_fields,)
