"""The tokenizer of rows: text with special tokens and in pairs, words, and conversations by a chat template.

A tokenizer first finds its special tokens in a rendered conversation, and encodes what is between them alone. So the
ids of these pieces, joined, are those of the whole, and pieces are encoded word by word (`WordEncoder`), which is
faster than by the tokenizer. A part of the assistant's may begin or end at a special token, or within a piece behind
the end of a line (`CutRule.ends_line`).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress, pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmaster.techniques.data.chat_template import ANSWER, ChatTemplate, Message, Remark
from ringmaster.techniques.data.special_tokens import TemplatePiece, ids_of, kept_of, layout_of, own_texts
from ringmaster.techniques.data.text_encoder import TextEncoder, puts_no_space

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The chat template that a tokenizer trained on the data gets (OpenAI's ChatML)."""
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, kw_only=True)
class EncodedText:
    """Tokens with special ones.

    segments: the type of each token, where the tokenizer gives types (`token_type_ids`); None where all of a single
        text are 0, as a model reads them without.
    kept: which of the given tokens of the (first) text were kept. start: where they begin.
    """

    tokens: list[int]
    segments: list[int] | None
    kept: range
    start: int


class RowTokenizer:
    """Encodes the texts of rows with the tokenizer in `folder`, which `AutoTokenizer` loads.

    The texts of many rows are encoded together by `prefetch`, and looked up by `encode`.

    Attributes:
        encoder: encodes many texts at once, as arrays.
        rule: where text may be cut so that the ids of its parts are those of the whole; None where that is unknown.
        vocab_size: the number of tokens, special ones included.
        end_id: the token that ends a text; None if there is none.
        end_text: that token as it is written; "" if there is none.
        pad_id: the token that fills up shorter texts: the end of a text where the tokenizer has none for it.
        unk_id: the token of what the tokenizer does not know; None if there is none.
        special_token_ids: all special tokens, that of unknown text included.
        num_cut: how often `with_special` has cut a text or a pair.
        num_written: how many texts `encode` was called with that have special tokens, which are plain text there.
        template: the chat template.
        remarks: what is to be said of the conversations since it was set to 0.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self.encoder = TextEncoder(self._tokenizer)
        self.rule = None if self.encoder.words is None else self.encoder.words.rule
        self._rendered_encoder = RenderedEncoder(self._tokenizer, self.encoder)
        self._known: dict[str, list[int]] = {}
        self.template = ChatTemplate(self._tokenizer)
        added = self._tokenizer.added_tokens_decoder
        self.vocab_size = max(len(self._tokenizer), 1 + max(added, default=-1))  # there may be holes
        self.end_id: int | None = self._tokenizer.eos_token_id
        self.end_text: str = self._tokenizer.eos_token or ""
        own: int | None = self._tokenizer.pad_token_id
        self.pad_id = next((token for token in (own, self.end_id) if token is not None), 0)
        self.unk_id: int | None = self._tokenizer.unk_token_id
        special = {number for number, token in added.items() if token.special}
        self.special_token_ids = frozenset(special.union(self._tokenizer.all_special_ids))
        self.num_cut = self.num_written = 0
        self.remarks = Remark(0)

    @cached_property
    def start_ids(self) -> list[int]:
        """The special tokens before a text, such as the beginning of a text (BOS)."""
        before = takewhile(lambda part: part.text is None, self._layout)
        return [*chain.from_iterable(part.ids for part in before)]

    @property
    def num_end_ids(self) -> int:
        """The number of special tokens behind a text."""
        behind = takewhile(lambda part: part.text is None, reversed(self._layout))
        return sum(len(part.ids) for part in behind)

    @property
    def unknown_content_id(self) -> int | None:
        """The token of unknown text; None where it is also that of the end of a text, and so says nothing."""
        return None if self.unk_id == self.end_id else self.unk_id

    def prefetch(self, texts: Iterable[str]) -> None:
        """Encodes the texts that `encode` is called with next."""
        wanted = list(dict.fromkeys(texts))
        encoded = self._encoded(wanted) if wanted else []
        self._known = dict(zip(wanted, encoded, strict=True))

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, without special tokens; special tokens in the text are plain text."""
        self.num_written += self.encoder.written.are_plain_in(text)
        known = self._known.get(text)
        return self._encoded([text])[0] if known is None else known

    def with_special(
        self, ids: Sequence[int], pair: Sequence[int] | None = None, *, at_most: int | None
    ) -> EncodedText:
        """Returns tokens with the tokenizer's special tokens, such as [CLS] and [SEP], and their types.

        at_most: the number of tokens to which they are cut, as the tokenizer does (`longest_first`, `truncation_side`).
            Special tokens are kept.
        """
        layout, texts = (self._layout, [ids]) if pair is None else (self._pair_layout, [ids, pair])
        lengths = [*map(len, texts)]
        num_special = sum(len(part.ids) for part in layout if part.text is None)
        most = sum(lengths) if at_most is None else max(at_most - num_special, 0)
        self.num_cut += sum(lengths) > most
        tokenizer = self._tokenizer
        kept = kept_of(lengths, most, is_fast=tokenizer.is_fast, is_left=tokenizer.truncation_side == "left")
        tokens, segments, start = list[int](), list[int](), 0
        for part in layout:
            if part.text == 0:
                start = len(tokens)
            here = part.ids if part.text is None else texts[part.text][kept[part.text].start : kept[part.text].stop]
            tokens += here
            segments += [part.type] * len(here)
        has_segments = "token_type_ids" in tokenizer.model_input_names and (pair is not None or any(segments))
        return EncodedText(tokens=tokens, segments=segments if has_segments else None, kept=kept[0], start=start)

    def word_texts(self, words: Sequence[str]) -> list[str]:
        """Returns words as the texts that are encoded, each alone, as `is_split_into_words` does.

        A byte-level tokenizer tells a word behind a space from others. One that puts no space before a word itself
        (`add_prefix_space`) gets it with all words but the first, as in a text.
        """
        return [f" {word}" if place and self._needs_spaces else word for place, word in enumerate(words)]

    @cached_property
    def _needs_spaces(self) -> bool:
        if not self._tokenizer.is_fast or not puts_no_space(self._tokenizer.backend_tokenizer):
            return False
        words = [word for text in own_texts(self._tokenizer.backend_tokenizer) for word in text.split()]
        alone = self._tokenizer(words, is_split_into_words=True, add_special_tokens=False, verbose=False)["input_ids"]
        return [alone] != ids_of(self._tokenizer, [" ".join(words)])

    def own_call(
        self,
        text: str | Sequence[str],
        pair: str | None = None,
        *,
        at_most: int | None = None,
        target: str | None = None,
    ) -> Any:
        """Returns what the tokenizer's own call gives for a text, a pair, words, or a text and its target.

        `encode`, `with_special` and `target` give the same by shorter ways. The result is a `BatchEncoding`; None where
        the tokenizer cannot be told to read the special tokens that are written in a text as plain text, and where
        `at_most` leaves no room for a token.
        """
        tokenizer, written = self._tokenizer, self.encoder.written
        texts = [text, pair or target or ""] if isinstance(text, str) else text
        is_written = any(map(written.are_plain_in, texts))
        can_split = tokenizer.is_fast and not any(map(written.are_left_in, texts))
        has_room = at_most is None or at_most > tokenizer.num_special_tokens_to_add(pair is not None)
        if (is_written and not can_split) or not has_room:
            return None
        settings: dict[str, Any] = {"split_special_tokens": True} if is_written else {}
        settings |= {} if at_most is None else {"truncation": True, "max_length": at_most}
        settings |= {} if target is None else {"text_target": target}
        is_words = not isinstance(text, str)
        return tokenizer([*text] if is_words else text, pair, is_split_into_words=is_words, verbose=False, **settings)

    def target(self, text: str, *, at_most: int) -> list[int]:
        """Returns the tokens of what an encoder-decoder writes, with the special tokens of targets.

        Special tokens in the text are plain text. at_most: the number of tokens to which they are cut; special tokens
        are kept.
        """
        tokens = self._target_ids(text)
        if len(tokens) <= at_most:
            return tokens
        self.num_cut += 1
        around = self.empty_target
        num_before = next((n for n, pair in enumerate(zip(around, tokens, strict=False)) if pair[0] != pair[1]), 0)
        num_after = len(around) - num_before
        return [*tokens[: max(at_most - num_after, 0)], *tokens[len(tokens) - num_after :]]

    @cached_property
    def empty_target(self) -> list[int]:
        """The special tokens of targets: those before the text, and those after it."""
        return self._target_ids("")

    def _target_ids(self, text: str) -> list[int]:
        settings = {"split_special_tokens": True} if self.encoder.written.are_plain_in(text) else {}
        tokens: list[int] = self._tokenizer(text_target=text, verbose=False, **settings)["input_ids"]
        return tokens

    def is_token(self, token: int, text: str) -> bool:
        """Returns whether a token is the added one that is written so."""
        added = self._tokenizer.added_tokens_decoder.get(token)
        return added is not None and str(added) == text

    @property
    def languages(self) -> tuple[str, str] | None:
        """The codes of the languages that the tokenizer marks texts and targets with; None where it marks none."""
        codes = tuple(getattr(self._tokenizer, name, None) for name in ("src_lang", "tgt_lang"))
        return None if None in codes else (str(codes[0]), str(codes[1]))

    def chat(self, messages: Sequence[Message], *, tools: Any = None) -> tuple[TokenIds, Marks]:
        """Returns the tokens of a conversation by the tokenizer's chat template, and which ones the assistant wrote.

        [tokens] each. What the assistant wrote in messages of `weight` 0 does not count.

        The assistant's parts are those between {% generation %} and {% endgeneration %} of the template, as in TRL. In
        a template without these, such a part begins after the generation prompt, and ends with what is rendered for the
        message. They are found in the rendered text, so the tokens are those of the whole conversation. Special tokens
        that are written in a message are special, as in `apply_chat_template`.

        Raises ValueError where there is no template, where it refuses the messages or leaves a part of them out, or
        where the assistant's parts cannot be told apart.
        """
        answers = [turn for turn, message in enumerate(messages) if message["role"] == ANSWER]
        is_learnt = [messages[turn].get("weight") != 0 for turn in answers]
        learnt = [*compress(answers, is_learnt)]
        text, written = self._checked(messages, tools, learnt=learnt, finds_answers=True)
        if written is None:
            written = [self._span(messages, turn, text, tools) for turn in learnt]
        elif not all(is_learnt):
            if len(written) != len(answers):
                raise ValueError(
                    f"the chat template marks {len(written)} parts of {len(answers)} messages of the assistant's, so "
                    "that those of weight 0 cannot be separated. To fix: give one conversation a row for each answer"
                )
            written = [*compress(written, is_learnt)]
        return self._rendered_encoder(text, written)

    def answered(self, prompt: Sequence[Message], answer: Sequence[Message], *, tools: Any = None) -> list[int]:
        """Returns the tokens of a prompt with the messages that answer it, of which the latter are learnt."""
        messages = [*prompt, *answer]
        text, _ = self._checked(messages, tools, learnt=range(len(prompt), len(messages)))
        tokens: list[int] = self._rendered_encoder(text, [])[0].tolist()
        return tokens

    def prompt(self, messages: Sequence[Message], *, tools: Any = None) -> list[int]:
        """Returns the tokens of a conversation up to where the assistant's answer begins."""
        text, _ = self._checked(messages, tools, learnt=(), add_generation_prompt=True)
        tokens: list[int] = self._rendered_encoder(text, [])[0].tolist()
        return tokens

    def by_library(
        self, messages: Sequence[Message], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> tuple[list[int], list[bool] | None] | None:
        """Returns the tokens of a conversation by transformers' `apply_chat_template`, and its mask of answers.

        The mask is None where the template marks no answers, and where it is wrong: it continues to the end of all
        where the last character of an answer is in no token. Returns None where the call refuses the messages.
        """
        from jinja2 import TemplateError

        marks = self._tokenizer.is_fast and not add_generation_prompt and self.template.marks_answers(tools)
        try:
            result = self._tokenizer.apply_chat_template(
                list(self.template.formed(messages)),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=marks,
            )
        except (TemplateError, TypeError):  # it leaves keys without values out, which some templates need
            return None
        if marks and any(result["assistant_masks"]):
            text, answers = self.template.rendered(messages, tools=tools, finds_answers=True)
            encoded = self._tokenizer(text, add_special_tokens=False, verbose=False)
            marks = all(encoded.char_to_token(answer.stop - 1) is not None for answer in answers or ())
        return result["input_ids"], [bool(mark) for mark in result["assistant_masks"]] if marks else None

    def _checked(
        self,
        messages: Sequence[Message],
        tools: Any,
        *,
        learnt: Collection[int],
        add_generation_prompt: bool = False,
        finds_answers: bool = False,
    ) -> tuple[str, list[range] | None]:
        """What the template renders, see `ChatTemplate.rendered`, where nothing is left out that must not be."""
        text, written = self.template.rendered(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, finds_answers=finds_answers
        )
        is_shortened = self.template.check(
            text, messages, tools, learnt=learnt, add_generation_prompt=add_generation_prompt
        )
        self.remarks |= Remark.RENDERED | (Remark.SHORTENED if is_shortened else 0)
        self.remarks |= Remark.SPECIAL if self.template.has_special(messages) else 0
        return text, written

    def _span(self, messages: Sequence[Message], turn: int, text: str, tools: Any) -> range:
        """The characters of the assistant's part of a message, by rendering the conversation up to it."""
        first: int | None
        if turn == 0:
            first = self._end_of_header(messages, text, tools)
        else:
            before, _ = self.template.rendered(messages[:turn], tools=tools, add_generation_prompt=True)
            first = len(before) if text.startswith(before) else None
        is_last = turn + 1 == len(messages)
        upto = text if is_last else self.template.rendered(messages[: turn + 1], tools=tools)[0]
        if first is None or not text.startswith(upto) or len(upto) < first:
            raise ValueError(
                f"message {turn + 1} is rendered in another way by the chat template where other messages follow it, "
                "or without what begins an answer, so that the assistant's tokens cannot be separated. To fix: give "
                "a chat template that marks answers with {% generation %}, or one conversation a row for each answer"
            )
        return range(first, len(upto))

    def _end_of_header(self, messages: Sequence[Message], text: str, tools: Any) -> int | None:
        """Where the first message begins behind what the template begins an answer with; None where that is unknown."""
        prompt, _ = self.template.rendered(messages, tools=tools, add_generation_prompt=True)
        header = prompt.removeprefix(text)
        return text.index(header) + len(header) if header != prompt and header and header in text else None

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        return [ids.tolist() for ids in self.encoder(texts)]

    @cached_property
    def _layout(self) -> list[TemplatePiece]:
        """What the tokenizer makes of a text."""
        return layout_of(self._tokenizer, num_texts=1)

    @cached_property
    def _pair_layout(self) -> list[TemplatePiece]:
        """What the tokenizer makes of two texts."""
        return layout_of(self._tokenizer, num_texts=2)


def complete_tokenizer(folder: Path, *, has_padding: bool, has_chat_template: bool, pad_id: int | None = None) -> None:
    """Gives the tokenizer in `folder` what its files lack.

    has_padding: the padding token that rows have, so that texts are encoded in batches. pad_id: that of its model, None
        where it is unknown: the token is then the end of a text, or the first one. has_chat_template: ChatML, with
        its special tokens, for a tokenizer that was trained on the data.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    if has_padding and tokenizer.pad_token_id is None:
        of_model = pad_id if isinstance(pad_id, int) and 0 <= pad_id < len(tokenizer) else None
        token = tokenizer.eos_token if of_model is None else tokenizer.convert_ids_to_tokens(of_model)
        tokenizer.pad_token = token or tokenizer.convert_ids_to_tokens(0)
    if has_chat_template:
        tokenizer.add_special_tokens({"additional_special_tokens": list(CHATML_TOKENS)})
        tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(str(folder))


TokenIds = NDArray[np.int64]
Marks = NDArray[np.bool_]

RENDERED_SAMPLE = "user\nA sample,  isn't it? naïve 日本\n\n{0}\nassistant\n  Yes. {1}{0} \n {1}\n"


class RenderedEncoder:
    """Encodes texts in which special tokens are special, without adding any.

    tokenizer: one of transformers. encoder: encodes texts by it in which special tokens are plain text.
    """

    def __init__(self, tokenizer: Any, encoder: TextEncoder) -> None:
        self._tokenizer, self._encoder = tokenizer, encoder
        self._special: dict[str, NDArray[np.uint32]] = {}
        self._pieces: re.Pattern[str] | None = None
        added = getattr(tokenizer, "added_tokens_decoder", {})
        if encoder.words is None or not all(map(_is_plain, added.values())):
            return
        self._special = {str(token): np.array([number], dtype=np.uint32) for number, token in added.items()}
        # The longest of those that begin at one place is found, as by the tokenizer.
        longest_first = sorted(self._special, key=len, reverse=True)
        self._pieces = re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else "(?!)()")
        sample = RENDERED_SAMPLE.format(*(longest_first * 2 or ["", ""]))
        if not np.array_equal(self(sample, [])[0], self._by_tokenizer(sample, [])[0]):
            self._pieces = None

    def __call__(self, text: str, spans: Sequence[range]) -> tuple[TokenIds, Marks]:
        """Returns the token ids of a text, and which tokens have a part in one of the spans: [tokens] each.

        spans: of characters, in order, apart from one another.
        """
        result = self._by_pieces(text, spans) if self._pieces is not None else None
        return self._by_tokenizer(text, spans) if result is None else result

    def _by_tokenizer(self, text: str, spans: Sequence[range]) -> tuple[TokenIds, Marks]:
        if not spans:
            ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            return np.asarray(ids, dtype=np.int64), np.zeros(len(ids), dtype=bool)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        places = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        starts, ends = places[:, 0], np.maximum(places[:, 1], places[:, 0] + 1)
        marks = np.zeros(len(starts), dtype=bool)
        for span in spans:
            marks |= (span.start < ends) & (starts < span.stop)
        return np.asarray(encoded["input_ids"], dtype=np.int64), marks

    def _by_pieces(self, text: str, spans: Sequence[range]) -> tuple[TokenIds, Marks] | None:
        """As `__call__`; None where a span begins or ends where its piece may not be divided."""
        assert self._pieces is not None
        assert self._encoder.words is not None
        rule = self._encoder.words.rule
        edges = [edge for span in spans for edge in (span.start, span.stop)]
        parts: list[str] = []
        is_marked: list[bool] = []
        start = 0
        for number, piece in enumerate(self._pieces.split(text)):
            end = start + len(piece)
            inner = edges[bisect_right(edges, start) : bisect_left(edges, end)]
            if inner and (number % 2 or not all(rule.ends_line(piece, edge - start) for edge in inner)):
                return None
            for first, last in pairwise([start, *inner, end]):
                if first < last:
                    parts.append(text[first:last])
                    is_marked.append(bisect_right(edges, first) % 2 == 1)
            start = end
        return self._joined(parts, is_marked)

    def _joined(self, parts: Sequence[str], is_marked: Sequence[bool]) -> tuple[TokenIds, Marks]:
        """The ids of parts, each a special token or a text without one, and the mark of each token."""
        if not parts:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=bool)
        encoded = iter(self._encoder([part for part in parts if part not in self._special]))
        ids = [next(encoded) if (special := self._special.get(part)) is None else special for part in parts]
        return np.concatenate(ids).astype(np.int64), np.repeat(is_marked, [len(each) for each in ids])


def _is_plain(token: Any) -> bool:
    """Whether an added token is found as it is written, wherever it is."""
    return not (token.lstrip or token.rstrip or token.single_word or token.normalized)
