"""What models of speech compute with: the loss of frames, and what a Whisper writes to a recording."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from ringmaster.features.speech.job import WHISPER
from ringmaster.techniques.data_source import PreparedData

if TYPE_CHECKING:
    from ringmaster.techniques.training.generation import AnswerWriter

SPEECH_INPUTS = frozenset({"input_features", "input_values"})
"""The names of what models of speech read."""
MAX_START_TOKENS = 4
"""The most tokens before a text: start, language, task and that there are no timestamps."""


def frame_losses(
    logits: Tensor, labels: Tensor, *, is_counted: Tensor, num_frames: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """Returns -log p(labels) of each row, [rows], in fp32.

    logits: [rows, frames, tokens]. labels: [rows, tokens], those that are counted.
    """
    log_p = functional.log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1)
    # Without cuDNN's kernel, as transformers calls it.
    with torch.backends.cudnn.flags(enabled=False):
        return functional.ctc_loss(
            log_p,
            labels.masked_select(is_counted),
            num_frames,
            is_counted.sum(-1),
            blank=blank,
            reduction="none",
            zero_infinity=zero_infinity,
        )


def _without_lengths(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """A loss with the memory of CTC, whose kernel reads lengths: it keeps a number for each frame and place of a text,
    two for each label and one more."""
    log_p = functional.log_softmax(logits, dim=-1, dtype=torch.float32)
    kept = log_p.new_ones(*log_p.shape[:2], 2 * labels.shape[1] + 1)
    return (log_p[..., :1] * kept).sum((1, 2))


def begin_whisper(model: Any, data: PreparedData) -> bool:
    """Makes a Whisper begin with the tokens before the text of a target: its start, language, task and no timestamps.

    Where the settings of the model name the tokens of languages and tasks, these are set by name, so that a
    `pipeline` of transformers may be told others; else by their numbers. Returns whether the model is a Whisper.
    """
    if model.config.model_type != WHISPER:
        return False
    settings = model.generation_config
    first, *prefix = [token for token in data.empty_target if token != settings.eos_token_id]
    model.config.decoder_start_token_id = settings.decoder_start_token_id = first
    languages = {number: name for name, number in getattr(settings, "lang_to_id", {}).items()}
    tasks = {number: name for name, number in getattr(settings, "task_to_id", {}).items()}
    language, task = (next((of[token] for token in prefix if token in of), None) for of in (languages, tasks))
    model.config.forced_decoder_ids = None
    if language is not None and task is not None:
        settings.language, settings.task, settings.forced_decoder_ids = language, task, None
    else:
        settings.forced_decoder_ids = [[place, token] for place, token in enumerate(prefix, start=1)] or None
    return True


def write_transcripts(writer: AnswerWriter, model: Any, batch: Mapping[str, Tensor]) -> list[list[int]] | None:
    """Returns the tokens of recordings, by the model's own settings, which begin as the targets in training do.

    Returns None of other rows.
    """
    from transformers import LogitsProcessorList

    from ringmaster.techniques.training.generation import num_expected
    from ringmaster.techniques.training.token_sampling import Beating

    names, labels = SPEECH_INPUTS & batch.keys(), batch.get("labels")
    if "input_ids" in batch or labels is None or not names:
        return None
    (name,) = names
    most = num_expected(labels, writer.max_new_tokens) if writer.ends.are_ignored else writer.max_new_tokens
    if (positions := getattr(model.config, "max_target_positions", None)) is not None:
        most = min(most, positions - MAX_START_TOKENS)
    mask = {key: batch[key].to(writer.device) for key in ("attention_mask",) if key in batch}
    was_training = model.training
    model.eval()
    with writer.autocast(), torch.no_grad():
        rows = model.generate(
            batch[name].to(writer.device),
            max_new_tokens=most,
            min_new_tokens=most if writer.ends.are_ignored else None,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            logits_processor=LogitsProcessorList([Beating(writer.beat)]),
            **mask,
        ).tolist()
    model.train(was_training)
    start, ends = model.generation_config.decoder_start_token_id, {writer.ends.pad_id, *writer.ends.token_ids}
    rows = [row[1:] if row and row[0] == start else row for row in rows]
    return rows if writer.ends.are_ignored else [[*takewhile(lambda token: token not in ends, row)] for row in rows]


WITHOUT_VALUES: Mapping[str, Callable[..., Any]] = {"frame_losses": _without_lengths}
TARGET_STARTS = (begin_whisper,)
ANSWER_WRITERS = (write_transcripts,)
