"""The kind of data `image-text`: conversations with images, for models of transformers' AutoModelForImageTextToText.

Files of images are stored as they are, and decoded when a batch is made: pixels take ten to a hundred times their
space. Tokens are prepared once, with all those that stand for images.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from ringmaster.codec import digest
from ringmaster.features.image_text.conversations import at_paths, conversation_of, images_in
from ringmaster.features.image_text.layouts import (
    ImageLayout,
    ImageTokens,
    decoded,
    file_bytes,
    layout_in,
    stacked,
)
from ringmaster.techniques.data import arrow_files
from ringmaster.techniques.data.chat_template import CONTENT, Message
from ringmaster.techniques.data.image_processors import digest_of, processor_files
from ringmaster.techniques.data.row_kind import IMAGE
from ringmaster.techniques.data.row_source import Columns, SampleContext
from ringmaster.techniques.data.samples import as_tensors
from ringmaster.techniques.data.sources.chat import (
    OF_TEMPLATES,
    WEIGHT,
    ChatOptions,
    ConversationSource,
    answered_chat,
    messages_of,
    tools_of,
)
from ringmaster.techniques.data.tokenizer_folders import load_tokenizer
from ringmaster.techniques.data_source import DataOptions, Dataset, PreparedData, Row, column, sample_tensors
from ringmaster.techniques.job_features import Description
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.metric import IGNORED

if TYPE_CHECKING:
    import torch

FILES, SIZES = "image_files", "image_sizes"
"""The stored columns with the bytes of all images of a sample, and how many bytes each has."""


@dataclass(frozen=True, kw_only=True)
class ImageTextOptions(ChatOptions):
    """The columns of a conversation and of its images, and the image processor."""

    images_column: Annotated[
        str | None, Description("the column that holds the images of a conversation: paths, or files as bytes")
    ] = column("images", "image", is_optional=True)
    processor: Annotated[
        str | None,
        Description("a folder or hub name with the image processor or feature extractor, by default data.tokenizer's"),
    ] = None


class ImageText(ConversationSource):
    """The tokens of a conversation with its images, with labels for the assistant's messages alone.

    Messages are as of kind `chat`. Their images are parts {"type": "image"}: with a path or URL under `image`, `path`
    or `url`, or else the next one of the column of images. Paths are relative to the file of the row. The special
    tokens of an image, as the model's processor writes them, count in `seq_len` and are not learnt.
    """

    name = "image-text"
    options_class: ClassVar[type[DataOptions]] = ImageTextOptions
    needs_tokenizer = True
    encodes_texts = False
    file_role = IMAGE
    keeps_files = False  # images are files of their own
    is_causal = True
    rows_at_once = 16
    uncut = frozenset({FILES, SIZES})
    padding: ClassVar[Mapping[str, int]] = {**ConversationSource.padding, FILES: 0, SIZES: 0}
    decisive: ClassVar[Mapping[str, str]] = {
        **OF_TEMPLATES,
        **dict.fromkeys(
            ("video", "videos", "audio", "audios"),
            "and only images and texts are read. To fix: remove the rows that need it",
        ),
    }
    tokens: ImageTokens | None = None  # of the data that is being written
    layout: ImageLayout | None = None  # of samples that are read
    sequences: ClassVar[tuple[int, ...]] = ()  # the number of sequences of a sample, where there are several

    def check(self, spec: DataSpec) -> None:
        """Requires the tokenizer of a model, whose special tokens stand for images."""
        super().check(spec)
        if spec.tokenizer is None:
            raise ValueError(
                "data: kind image-text needs data.tokenizer. To fix: set it to the folder or hub name of the model, "
                "which has the tokens of images, a chat template and the image processor"
            )

    def origin(self, spec: DataSpec) -> tuple[str, Any]:
        """Returns where the rows come from, and the content of the processor's files."""
        location, state = super().origin(spec)
        return location, {**state, "processor": digest_of(processor_files(self._processor(spec)))}

    def _processor(self, spec: DataSpec) -> str:
        return str(self.options(spec).processor or spec.tokenizer)

    def values(self, row: Row, columns: Columns, *, spec: DataSpec) -> dict[str, Any]:
        """Returns the values by role, with the folder in which paths of images begin."""
        folder = None if spec.path is None else Path(row.file).parent
        return {
            **super().values(row, columns, spec=spec),
            "images": columns.by_role(row.content)["images"],
            "folder": folder,
        }

    def file_paths(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Yields the paths of the images of a row; none of a wrong row."""
        images = images_in(values["images"])
        with suppress(ValueError):
            _, images = conversation_of(values)
        for image in images:
            if isinstance(path := at_paths(image, values["folder"]), str) and "://" not in path:
                yield path

    def texts(self, row: Mapping[str, Any], *, context: SampleContext) -> Iterable[str]:
        """Returns nothing, as no tokenizer is trained on the data."""
        return ()

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the tokens, labels for those that the assistant wrote, and the files of the images."""
        messages, given = conversation_of(row, roles=context.tokenizer.template.roles)
        weights = [message.get(WEIGHT) for message in messages if message["role"] == "assistant"]
        if all(weight == 0 for weight in weights):
            what = "all messages of the assistant's have weight 0" if weights else "no message is the assistant's"
            raise ValueError(f"{what}, so there is nothing to learn. To fix: remove the row")
        files = _files(given, row["folder"])
        assert self.tokens is not None
        tokens, written = context.tokenizer.chat(messages, tools=tools_of(row["tools"]))
        tokens, written = self.tokens.placed(tokens, written, [*map(decoded, files)], max_length=context.max_length)
        return {"input_ids": tokens, "labels": np.where(written, tokens, IGNORED), **_stored(files)}

    def reference(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any] | None:
        """Returns what `apply_chat_template` of the model's processor gives; None where that cannot be loaded here.

        Labels are compared where the template marks the assistant's messages, and all of them are learnt.
        """
        messages, given = conversation_of(row, roles=context.tokenizer.template.roles)
        return self._called(messages, given, row, context)

    def _called(
        self, messages: Sequence[Message], given: Sequence[Any], row: Mapping[str, Any], context: SampleContext
    ) -> Mapping[str, Any] | None:
        """What the model's processor gives for messages with images, see `reference`."""
        processor = processor_of(str(context.spec.tokenizer))
        if processor is None or self._processor(context.spec) != context.spec.tokenizer:
            return None
        images = iter([decoded(at_paths(each, row["folder"])) for each in given])
        template, tools = context.tokenizer.template, tools_of(row["tools"])
        result = processor.apply_chat_template(
            [with_images(each, images) for each in template.formed(messages)],
            tools=tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=template.marks_answers(tools),
            processor_kwargs={"add_special_tokens": False},
        )
        tokens = np.asarray(result["input_ids"]).reshape(-1)
        written = np.asarray(result.get("assistant_masks", [])).reshape(-1)
        if not written.any() or any(message.get(WEIGHT) == 0 for message in messages):
            return {"input_ids": tokens}
        return {"input_ids": tokens, "labels": np.where(written, tokens, IGNORED)}

    def write(self, folder: Path, spec: DataSpec, *, where: str, cache_dir: Path) -> PreparedData:
        """Writes the samples, and the files of the image processor as they are."""
        name = self._processor(spec)
        files = processor_files(name)
        (folder / "processor").mkdir()
        for file, content in files.items():
            (folder / "processor" / file).write_bytes(content)
        kind = copy.copy(self)
        kind.tokens = tokens = ImageTokens(layout_in(name), load_tokenizer(str(spec.tokenizer)))
        prepared = super(ImageText, kind).write(folder, spec, where=where, cache_dir=cache_dir)
        shapes = {each: (*self.sequences, *values.shape) for each, values in tokens.arrays.items()}
        numbers = {each: values.tolist() for each, values in tokens.arrays.items() if values.dtype.kind == "i"}
        return replace(
            prepared,
            digest=digest([prepared.digest, digest_of(files)]),
            tensors=(*prepared.tensors, *sample_tensors(tokens.arrays, shapes)),
            images={"token": tokens.token, "counts": tokens.counts, "arrays": numbers},
        )

    def samples(self, table: arrow_files.Table, prepared: PreparedData) -> Dataset:
        """Returns the samples in the rows of a table, with their images."""
        assert prepared.processor_dir is not None
        result = copy.copy(self)
        result.layout = layout_in(str(prepared.processor_dir))
        return super(ImageText, result).samples(table, prepared)

    def collate(self, columns: Mapping[str, arrow_files.Array]) -> dict[str, torch.Tensor]:
        """Returns the tokens of a batch and, of samples that are read, the arrays of their images."""
        import torch

        batch = as_tensors({name: values for name, values in columns.items() if name not in self.uncut})
        if self.layout is None:  # while samples are described
            return batch
        files = zip(columns[FILES], columns[SIZES], strict=True)
        rows = [self.layout.arrays([*map(decoded, split_files(*each))]) for each in files]
        arrays = {name: torch.from_numpy(values) for name, values in stacked(rows).items()}
        for name, values in arrays.items():
            for number in self.sequences:
                arrays[name] = values.unsqueeze(1).expand(-1, number, *values.shape[1:]).contiguous()
        return {**batch, **arrays}


@dataclass(frozen=True, kw_only=True)
class ImagePreferenceOptions(DataOptions):
    """The columns of two answers to a prompt with images, and the image processor."""

    prompt_column: str | None = column("prompt", "question")
    chosen_column: str | None = column("chosen")
    rejected_column: str | None = column("rejected")
    tools_column: str | None = column("tools", is_optional=True)
    system_column: str | None = column("system", "system_prompt", is_optional=True)
    images_column: str | None = column("images", "image", is_optional=True)
    processor: str | None = None


class ImagePreference(ImageText):
    """Two rows of tokens, [2, tokens]: a prompt with images and the chosen answer, and with the rejected one.

    The prompt has no labels, and all images. Prompts and answers are lists of messages, or texts, which are a message
    of the user's and one of the assistant's.
    """

    name = "image-preference"
    message_roles = ImageText.message_roles | {"chosen", "rejected"}
    options_class: ClassVar[type[DataOptions]] = ImagePreferenceOptions
    usual_loss: ClassVar[str | None] = "simpo"  # which compares without a reference model
    sequences = (2,)

    def file_paths(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Yields the paths of the images of a row; none of a wrong row."""
        return super().file_paths(_with_prompt(values))

    def sample(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any]:
        """Returns the tokens and labels of both answers, the shorter one filled up, and the files of the images."""
        pairs, given = _conversations(row, context)
        files = _files(given, row["folder"])
        images, tools = [*map(decoded, files)], tools_of(row["tools"])
        assert self.tokens is not None
        placed = []
        for prompt, answer in pairs:
            each = answered_chat(prompt, answer, context, tools=tools)
            tokens, written = np.asarray(each["input_ids"]), np.asarray(each["labels"]) != IGNORED
            placed.append(self.tokens.placed(tokens, written, images, max_length=context.max_length))
        width = max(len(tokens) for tokens, _ in placed)
        ids, labels = np.full((2, width), context.tokenizer.pad_id), np.full((2, width), IGNORED)
        for place, (tokens, written) in enumerate(placed):
            ids[place, : len(tokens)], labels[place, : len(tokens)] = tokens, np.where(written, tokens, IGNORED)
        return {"input_ids": ids, "labels": labels, **_stored(files)}

    def reference(self, row: Mapping[str, Any], *, context: SampleContext) -> Mapping[str, Any] | None:
        """Returns the tokens that the model's processor gives for the prompt with each answer."""
        pairs, given = _conversations(row, context)
        tokens = [self._called([*prompt, *answer], given, row, context) for prompt, answer in pairs]
        known = [each["input_ids"] for each in tokens if each is not None]
        if len(known) < len(tokens):
            return None
        width = max(map(len, known))
        return {
            "input_ids": [
                np.pad(each, (0, width - len(each)), constant_values=context.tokenizer.pad_id) for each in known
            ]
        }


def _with_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its prompt as messages."""
    prompt = row["prompt"]
    is_text = isinstance(prompt, str) and not prompt.lstrip().startswith("[")
    return {**row, "messages": [{"role": "user", "content": prompt}] if is_text else prompt}


def _conversations(
    row: Mapping[str, Any], context: SampleContext
) -> tuple[list[tuple[list[Message], list[Message]]], list[Any]]:
    """The messages of the prompt with those of each answer, and the images of the prompt.

    Raises ValueError where these are wrong, or an answer is not the assistant's.
    """
    roles = context.tokenizer.template.roles
    prompt, given = conversation_of(_with_prompt(row), roles=roles)
    pairs = []
    for role in ("chosen", "rejected"):
        text = row[role] if isinstance(row[role], str) and not row[role].lstrip().startswith("[") else None
        given_text = [{"role": "assistant", "content": text}]
        answer = messages_of(row[role] if text is None else given_text, roles=roles)
        if answer[0]["role"] != "assistant":
            raise ValueError(
                f"{role} begins with a message of {answer[0]['role']}. To fix: give the answer alone, and what comes "
                "before it as the prompt"
            )
        pairs.append((prompt, answer))
    return pairs, given


def _files(given: Sequence[Any], folder: Path | None) -> list[bytes]:
    """The files of a row's images. Raises ValueError, with all faults, where some are missing or broken."""
    files, faults = list[bytes](), list[str]()
    for number, image in enumerate(given, start=1):
        value = at_paths(image, folder)
        try:
            decoded(value)
            files.append(file_bytes(value))
        except (OSError, ValueError) as error:
            what, _, _ = str(error).partition(". To fix: ")
            faults.append(f"image {number} of {len(given)}: {what}")
    if faults:
        raise ValueError(f"{'; '.join(faults)}. To fix: replace the files, or remove the row")
    return files


def with_images(message: Message, images: Iterator[Any]) -> Message:
    """Returns a message whose parts have the next ones of some images, as processors of transformers take them."""
    if not isinstance(message.get(CONTENT), list):
        return message
    parts = [{**part, "image": next(images)} if part["type"] == "image" else part for part in message[CONTENT]]
    return {**message, CONTENT: parts}


@lru_cache(maxsize=4)
def processor_of(name: str) -> Any:
    """Returns the processor of a model, which calls its tokenizer and its image processor; None where it needs more.

    Some need packages of videos, which are not read.
    """
    from transformers import AutoProcessor, ProcessorMixin

    try:
        result = AutoProcessor.from_pretrained(name, local_files_only=Path(name).is_dir(), trust_remote_code=False)
    except (ImportError, OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return result if isinstance(result, ProcessorMixin) else None  # else a tokenizer, of a folder that names no class


def _stored(files: Sequence[bytes]) -> dict[str, arrow_files.Array]:
    return {
        FILES: np.frombuffer(b"".join(files), np.uint8),
        SIZES: np.array([*map(len, files)], np.int64),
    }


def split_files(values: arrow_files.Array, sizes: arrow_files.Array) -> list[bytes]:
    """Returns the files of a sample's images. values: their bytes, one after another. sizes: of each, and 0."""
    ends = np.cumsum(sizes)
    return [values[end - size : end].tobytes() for end, size in zip(ends, sizes, strict=True) if size]
