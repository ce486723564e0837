"""What a model writes to prompts, token by token, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ringmaster.codec import digest
from ringmaster.techniques.data.chat_template import ChatTemplate, TurnEnd


def prompt_seed(seed: int, step: int | str, place: int) -> int:
    """Returns the seed of the completions of one prompt, the one at `place` in the global batch of a step."""
    return int(digest(["completions", seed, step, place]), 16) % (1 << 63)


@dataclass(frozen=True, kw_only=True)
class EndTokens:
    """How completions end.

    token_ids: a completion ends with the first of them.
    pad_id: fills up shorter completions.
    text: a text that ends the answers of conversations, if any.
    are_ignored: whether completions have the greatest length whatever they contain, as in trials, whose speed and
        memory must not be underestimated. Answers to held-out prompts then have the length of the true ones, as the
        model is not trained.
    """

    token_ids: tuple[int, ...]
    pad_id: int
    text: EndText | None = None
    are_ignored: bool = False

    def end(self, prompt: Sequence[int], completion: Sequence[int]) -> bool:
        """Returns whether a completion of a prompt has an end."""
        by_text = self.text is not None and self.text.suits(prompt) and self.text.is_in(completion)
        return by_text or completion[-1] in self.token_ids


class EndText:
    """A text that ends answers where a chat template writes no token for that."""

    def __init__(self, tokenizer: Any, end: TurnEnd) -> None:
        self._tokenizer, self._prompt_end = tokenizer, list(end.prompt_end)
        # As the tokenizer writes a text that it has read.
        self._text = self._decoded(tokenizer(end.text, add_special_tokens=False)["input_ids"])

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)).strip()

    def suits(self, prompt: Sequence[int]) -> bool:
        """Returns whether a prompt ends as those of conversations do."""
        return list(prompt[-len(self._prompt_end) :]) == self._prompt_end

    def is_in(self, tokens: Sequence[int]) -> bool:
        """Returns whether the last of some tokens have the text."""
        return self._text in self._decoded(tokens[-4 * len(self._text) :])  # a character has at most four tokens


class _TextCriteria(StoppingCriteria):  # type: ignore[misc]
    """Ends completions at texts. texts: of each sequence, if any. width: of the prompts."""

    def __init__(self, texts: Sequence[EndText | None], width: int) -> None:
        self._texts, self._width = texts, width

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Returns which sequences are complete, [sequences]."""
        rows = zip(input_ids[:, self._width :].tolist(), self._texts, strict=True)
        are_complete = [text is not None and text.is_in(row) for row, text in rows]
        return torch.tensor(are_complete, device=input_ids.device)


def end_tokens_of(tokenizer: Any, model: nn.Module) -> EndTokens:
    """Returns how completions end: by the end of text of the tokenizer, if any, or of the model, or of an answer.

    The latter is what the tokenizer's chat template writes behind an answer, which is not always its end of text.
    """
    named: Any = model.generation_config.eos_token_id  # type: ignore[union-attr]
    of_model = list(named) if isinstance(named, (list, tuple)) else [named]
    of_turn = TurnEnd() if tokenizer is None else ChatTemplate(tokenizer).turn_end
    of_text = tokenizer and tokenizer.eos_token_id
    known = [token for token in (of_text, *of_model, *of_turn.token_ids) if token is not None]
    pad = next((token for token in (tokenizer and tokenizer.pad_token_id, *known) if token is not None), 0)
    text = EndText(tokenizer, of_turn) if of_turn.text and of_turn.prompt_end else None
    return EndTokens(token_ids=tuple(dict.fromkeys(known)), pad_id=int(pad), text=text)


class Beating(LogitsProcessor):  # type: ignore[misc]
    """Calls a function before each token, of which the likeliest one is taken."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat = beat

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns the scores, [sequences, vocabulary]."""
        self._beat()
        return scores


def encodes(model: nn.Module) -> bool:
    """Returns whether a model has an encoder, which reads what a decoder answers to."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


@torch.no_grad()
def sample(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    ends: EndTokens,
    device: torch.device,
    processor: LogitsProcessor,
    number: int = 1,
) -> list[list[list[int]]]:
    """Returns the tokens of the completions of each prompt, each with the token that ended it, if one did.

    model: a language model of transformers; it is in eval mode meanwhile.
    prompts: the tokens of each. max_new_tokens: the most of a completion. number: the completions of each prompt.
    processor: makes scores whose greatest one is the next token.
    """
    width = max(map(len, prompts))
    tokens = torch.full((len(prompts), width), ends.pad_id, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        # Filled up on the left, so that all completions begin at one place; what an encoder reads as in training, on
        # the right, as its positions may be counted from the first token of the row.
        first = 0 if encodes(model) else width - len(prompt)
        tokens[row, first : first + len(prompt)] = torch.as_tensor(prompt)
        mask[row, first : first + len(prompt)] = 1
    ended = () if ends.are_ignored else ends.token_ids
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        eos_token_id=list(ended) or None,
        pad_token_id=ends.pad_id,
    )
    if encodes(model):
        settings: list[Any] = [model.generation_config, model.config]
        firsts = (getattr(each, "decoder_start_token_id", None) for each in settings)
        config.decoder_start_token_id = next((first for first in firsts if first is not None), None)
        config.forced_bos_token_id = settings[0].forced_bos_token_id
        width = 1  # the decoder's first token
    text = None if ends.are_ignored else ends.text
    by_text = [text if text is not None and text.suits(prompt) else None for prompt in prompts for _ in range(number)]
    criteria = [_TextCriteria(by_text, width)] if any(by_text) else []
    was_training = model.training
    model.eval()
    with _without_defaults(model):
        written = model.generate(  # type: ignore[operator]
            tokens.repeat_interleave(number, 0).to(device),
            attention_mask=mask.repeat_interleave(number, 0).to(device),
            generation_config=config,
            logits_processor=LogitsProcessorList([processor]),
            stopping_criteria=StoppingCriteriaList(criteria),
        )
    model.train(was_training)
    rows = []
    for row, own in zip(written[:, width:].tolist(), by_text, strict=True):
        is_end = (token in ended or (own is not None and own.is_in(row[: i + 1])) for i, token in enumerate(row))
        last = next((place for place, ends_here in enumerate(is_end) if ends_here), len(row) - 1)
        rows.append(row[: last + 1])
    return [rows[first : first + number] for first in range(0, len(rows), number)]


@contextmanager
def _without_defaults(model: nn.Module) -> Iterator[None]:
    """Hides the model's own settings of generation, such as penalties: completions are samples of the policy alone."""
    own: Any = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
