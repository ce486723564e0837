"""Prompts with completions, which a language model learns."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from ringmaster.techniques.data import row_source
from ringmaster.techniques.data.chat_template import CALLS, Message
from ringmaster.techniques.data.row_kind import MEDIA
from ringmaster.techniques.data.row_tokenizer import RowTokenizer
from ringmaster.techniques.data.sources import chat
from ringmaster.techniques.data.sources.text_rows import filled
from ringmaster.techniques.data_source import DataOptions, column
from ringmaster.techniques.job_features import Description, Format
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.metric import IGNORED

BESIDE_MESSAGES = {
    "system_prompt": "which is not read. To fix: set system_column to it, or put it into the prompt",
    **dict.fromkeys(
        ("reasoning_content", "thinking"),
        "which is not read. To fix: put it into the answers, as the model is to write it",
    ),
}
"""Columns with a part of the prompt, or of the answer, that other programs read."""


@dataclass(frozen=True, kw_only=True)
class CompletionOptions(DataOptions):
    """The columns of a prompt and its completion.

    retriever: the settings of the `Retriever` that finds passages for the prompt, which is text; None for no passages.
    """

    prompt_column: Annotated[
        str | None, Description("the column that holds the text before the answer, such as question")
    ] = column("prompt", "instruction", "question")
    completion_column: Annotated[
        str | None, Description("the column that holds the answer to learn, such as answer")
    ] = column("completion", "response", "output", "answer")
    input_column: str | None = column("input", "context", is_optional=True)
    tools_column: str | None = column("tools", is_optional=True)
    system_column: str | None = column("system", is_optional=True)
    history_column: str | None = column("history", is_optional=True)
    retriever: Annotated[
        Mapping[str, Any] | None,
        Format("retriever"),
        Description("the passages that samples read, such as {store: wiki@champion, k: 8}"),
    ] = None


class Completion(chat.ConversationSource):
    """The tokens of a prompt and of its completion. The prompt has no labels.

    Both are texts, encoded as one that ends with the end of text; or both are lists of messages, which the tokenizer's
    chat template renders, with the row's `tools`. The `input` of an instruction, as in Alpaca's files, or its `context`
    as in Dolly's, follows the prompt after an empty line, and `system` precedes it. Messages of the prompt that the
    completion repeats are left out of it. Rows with a `history` of turns are refused.
    """

    name = "completion"
    decisive: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("context", "passage", "article", "document"),
            "which is not read. To fix: set input_column to it, or put it into the prompt",
        ),
        **BESIDE_MESSAGES,
        **chat.OF_TEMPLATES,
        **MEDIA,
    }
    options_class: ClassVar[type[DataOptions]] = CompletionOptions
    needs_tokenizer = True
    is_causal = True
    packs = True
    version = 4

    def texts(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> Iterable[str]:
        """Returns both texts, also those of messages where a tokenizer is trained on them."""
        prompt, completion = prompt_with_context(row), row["completion"]
        if context.spec.tokenizer is not None and isinstance(prompt, str) and isinstance(completion, str):
            return (prompt, prompt + completion)  # which are encoded
        return chat.texts_of((prompt, completion), context)

    def reference(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> Mapping[str, Any] | None:
        """Returns the tokens of the tokenizer's own call for prompt and completion as one text, as in TRL."""
        if isinstance(row["completion"], list):
            prompt, answer = prompt_and_answer(row, "completion", context)
            return chat.chat_reference(prompt, context, answer=answer, tools=chat.tools_of(row["tools"]))
        tokens = answered_by_library(prompt_with_context(row), row["completion"], context)
        return None if tokens is None else {"input_ids": tokens}

    def with_passages(
        self, rows: Sequence[Mapping[str, Any]], *, context: row_source.SampleContext
    ) -> list[Mapping[str, Any]]:
        """Returns rows whose prompts begin with passages: as many of the k as leave room for prompt and completion."""
        retriever, tokenizer = context.retriever, context.tokenizer
        if retriever is None:
            return list(rows)
        questions = [prompt if isinstance(prompt := prompt_with_context(row), str) else "" for row in rows]
        retrieved, result = context.find_passages(questions), list(rows)
        for place, (row, question, passages) in enumerate(zip(rows, questions, retrieved, strict=True)):
            if not isinstance(prompt_with_context(row), str):
                continue
            num_around = len(tokenizer.start_ids) + 1
            while True:
                prompt = retriever.prompt([each.text for each in passages], question)
                num_tokens = len(tokenizer.encode(f"{prompt}{row['completion']}")) + num_around
                if num_tokens <= context.max_length or not passages:
                    break
                passages = passages[:-1]
            result[place] = {**row, "prompt": prompt, "input": None, "system": None}
        return result

    def remark(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> str | None:
        """Returns what to know of a completion that repeats the prompt, and of messages."""
        return REPEATED if repeats_prompt(row, "completion") else super().remark(row, context=context)

    def sample(self, row: Mapping[str, Any], *, context: row_source.SampleContext) -> Mapping[str, Any]:
        """Returns the tokens, and labels for those of the completion."""
        if context.retriever is not None and not isinstance(row["prompt"], str):
            raise ValueError("a retriever finds passages for prompts of text alone. To fix: give the prompt as text")
        if row["history"]:
            raise ValueError(
                "a row has a history. To fix: make its turns messages, for kind chat, or remove the column"
            )
        if isinstance(row["completion"], list):
            prompt, answer = prompt_and_answer(row, "completion", context)
            return chat.answered_chat(prompt, answer, context, tools=chat.tools_of(row["tools"]))
        chat.refuse_tools(row)
        for role in ("prompt", *(role for role in ("input", "system") if row[role])):
            row_source.text_of(row, role)
        completion = row_source.text_of(row, "completion", may_be_blank=True)
        return answered(prompt_with_context(row), [completion], context)[0]


def prompt_with_context(row: Mapping[str, Any]) -> Any:
    """Returns the prompt with what belongs to it before and behind it, after empty lines.

    One that is not text stays as it is.
    """
    if not isinstance(row["prompt"], str):
        return row["prompt"]
    parts = (row["system"] or None, row["prompt"], row["input"] or None)
    return "\n\n".join(str(part) for part in parts if part is not None)


REPEATED = (
    "the text of the prompt also begins what follows it, so that the model reads it twice and learns to repeat it, as "
    "in TRL; leave one of them out if it is not meant so"
)


def repeats_prompt(row: Mapping[str, Any], role: str) -> bool:
    """Returns whether the text of an answer begins with that of the prompt."""
    prompt, answer = row["prompt"], row[role]
    return isinstance(prompt, str) and isinstance(answer, str) and answer.lstrip().startswith(prompt.strip())


ASKING = ("system", "developer", "user")
"""The roles of messages that are not answers."""


def prompt_and_answer(
    row: Mapping[str, Any], role: str, context: row_source.SampleContext
) -> tuple[list[Message], list[Message]]:
    """Returns the messages of a row's prompt, and those of its answer without those of the prompt that it begins with.

    Raises ValueError where the answer is empty or begins with a question, or an input would be left out.
    """
    roles = context.tokenizer.template.roles
    answer = chat.as_messages(row[role], roles=roles)
    if row["input"] and not isinstance(row["prompt"], str):
        raise ValueError("an input cannot be combined with a prompt of messages. To fix: put it into a message")
    prompt = chat.as_messages(prompt_with_context({**row, "system": None}), roles=roles)
    if answer[: len(prompt)] == prompt:  # as in UltraFeedback
        answer = answer[len(prompt) :]
    if not any(message.get("content") or message.get(CALLS) for message in answer):
        raise ValueError(f"the {role} has no message of its own. To fix: add one, or remove the row")
    if answer[0]["role"] in ASKING:
        raise ValueError(
            f"the {role} begins with a message that is not an answer ({answer[0]['role']}) and that the prompt does "
            "not "
            f"begin with. To fix: move it into the prompt, or remove it from the {role} where the prompt has it already"
        )
    return chat.with_system(prompt, row["system"]), answer


def answered_by_library(prompt: str, answer: str, context: row_source.SampleContext) -> list[int] | None:
    """Returns the tokens of a prompt with its answer as the tokenizer's own call gives them, cut as a sample is.

    None where that call does not read written special tokens as text.
    """
    tokenizer = context.tokenizer
    text = prompt + answer.removesuffix(tokenizer.end_text)
    if (whole := tokenizer.own_call(text)) is None:
        return None
    tokens = whole["input_ids"]
    end = [] if tokenizer.end_id is None else [tokenizer.end_id]
    # What the tokenizer puts behind a text is not of TRL's tokens.
    return [*tokens[: len(tokens) - tokenizer.num_end_ids], *end][: context.max_length]


def answered(prompt: str, answers: Sequence[str], context: row_source.SampleContext) -> list[dict[str, list[int]]]:
    """Returns the tokens of a prompt with each of its answers, with labels for the answer alone.

    The tokens are those of TRL: special tokens before the text (BOS), then prompt and answer encoded as one text, then
    the end of text, once. Where the last token of the prompt has grown into an answer, all answers begin with it.
    """
    tokenizer = context.tokenizer
    end = [] if tokenizer.end_id is None else [tokenizer.end_id]
    alone = tokenizer.encode(prompt)
    whole = [tokenizer.encode(prompt + answer.removesuffix(tokenizer.end_text)) for answer in answers]
    num_of_prompt = len(tokenizer.start_ids) + min(num_common(alone, each) for each in whole)
    tokens = [[*tokenizer.start_ids, *each, *end] for each in whole]
    return [{"input_ids": each, "labels": [IGNORED] * num_of_prompt + each[num_of_prompt:]} for each in tokens]


def answer_context(tokenizer_dir: Path, *, max_length: int) -> row_source.SampleContext:
    """Returns what encodes answers as those of completions are encoded, by the tokenizer in a folder."""
    return row_source.SampleContext(
        spec=DataSpec(tokenizer=str(tokenizer_dir)),
        options=CompletionOptions(),
        max_length=max_length,
        _tokenizer=RowTokenizer(tokenizer_dir),
    )


def answer_tokens(prompt: Any, answer: Any, context: row_source.SampleContext) -> dict[str, list[int]]:
    """Returns the tokens of a prompt and its answer, texts or lists of messages, with labels for the answer alone."""
    if isinstance(prompt, str):
        return answered(prompt, [answer], context)[0]
    roles = context.tokenizer.template.roles
    messages, messages_of_answer = (chat.as_messages(each, roles=roles) for each in (prompt, answer))
    if isinstance(answer, str):
        messages_of_answer = [{"role": "assistant", "content": answer}]
    return chat.answered_chat(messages, messages_of_answer, context)


def aligned(rows: Sequence[Mapping[str, list[int]]], context: row_source.SampleContext) -> dict[str, Any]:
    """Returns rows of tokens and labels as arrays [rows, tokens], the shorter ones filled up."""
    fill = {"input_ids": context.tokenizer.pad_id, "labels": IGNORED}
    return {name: filled([each[name] for each in rows], value) for name, value in fill.items()}


def num_common(one: Sequence[Any], two: Sequence[Any]) -> int:
    """Returns the number of items at the start that are equal in both."""
    if one == two[: len(one)]:
        return len(one)
    pairs = enumerate(zip(one, two, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(two)))
