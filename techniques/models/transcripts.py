"""How a model of speech such as Whisper begins what it writes: as the targets that it was trained on."""

from collections.abc import Sequence
from typing import Any

WHISPER = "whisper"


def begin_transcripts(model: Any, empty_target: Sequence[int]) -> None:
    """Makes a Whisper begin with the tokens before the text of a target: its start, language, task and no timestamps.

    Where the settings of the model name the tokens of languages and tasks, these are set by name, so that a
    `pipeline` of transformers may be told others; else by their numbers.

    empty_target: the tokens of a target without text, with those before and behind it.
    """
    settings = model.generation_config
    first, *prefix = [token for token in empty_target if token != settings.eos_token_id]
    model.config.decoder_start_token_id = settings.decoder_start_token_id = first
    languages = {number: name for name, number in getattr(settings, "lang_to_id", {}).items()}
    tasks = {number: name for name, number in getattr(settings, "task_to_id", {}).items()}
    language, task = (next((of[token] for token in prefix if token in of), None) for of in (languages, tasks))
    model.config.forced_decoder_ids = None
    if language is not None and task is not None:
        settings.language, settings.task, settings.forced_decoder_ids = language, task, None
    else:
        settings.forced_decoder_ids = [[place, token] for place, token in enumerate(prefix, start=1)] or None
