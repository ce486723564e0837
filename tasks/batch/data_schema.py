"""Schema of the data section of a batch file: sample sources, and data sets by name and version."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.functional_validators import AfterValidator

from ringmaster.tasks.batch import references
from ringmaster.tasks.batch.field_types import (
    MOST_AT_ONCE,
    ColumnType,
    DataKind,
    Factory,
    FileFormat,
    Folder,
    Kwargs,
    Padding,
    Positive,
    Sampling,
    Source,
    Whole,
)
from ringmaster.techniques import job
from ringmaster.techniques.data.rows import FORMATS


class Section(BaseModel):
    """Base of all sections of a batch file: unknown keys are refused, and types are not coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, title=None)


class Window(Section):
    """The rows of a data set to read: one of last_days, last_rows, and since, until or both."""

    last_days: Positive | None = Field(default=None, description="days back from the newest row, such as 30")
    last_rows: Whole | None = Field(default=None, description="a number of rows, the last ones, such as 10000")
    since: str | float | None = Field(default=None, description="the first moment, such as 2026-01-31")
    until: str | float | None = Field(default=None, description="the moment before which rows lie, such as 2026-03-01")


class Data(Section):
    """The source of the samples: exactly one of source, path, dataset, factory, and the name of a data set.

    A kind of data that brings its own rows needs none of them.
    """

    source: Source | None = Field(
        default=None, description="a data set that every machine has: python-stdlib (text) or digits (images)"
    )
    # Before the paths, whose validation reads it.
    format: FileFormat | None = Field(default=None, description=f"one of {', '.join(FORMATS)}")
    path: Annotated[str, AfterValidator(references.files)] | None = Field(
        default=None,
        description='text, JSONL, CSV or Parquet files, relative to the batch file, such as "data/*.jsonl"',
    )
    dataset: Folder | None = Field(default=None, description="a Hugging Face datasets name or folder, such as wikitext")
    factory: Factory | None = Field(
        default=None,
        description='"package.module:function", which returns (training, held_out), such as my_data:load',
    )
    kind: DataKind | None = Field(
        default=None, description="what makes samples of the rows, such as text, or leave the key out"
    )
    kwargs: Kwargs = Field(
        default={}, description="the arguments of the factory, of load_dataset, or of the kind, such as {name: en}"
    )
    seq_len: Annotated[int, Field(ge=2, le=MOST_AT_ONCE)] | None = Field(
        default=None, description="the number of tokens of a text sample, such as 128"
    )
    vocab_size: Annotated[int, Field(ge=257, le=MOST_AT_ONCE)] = Field(
        default=job.DataSpec.vocab_size, description="the size of the byte-level vocabulary, such as 2048"
    )
    tokenizer: Folder | None = Field(default=None, description="a folder or hub name with a tokenizer, such as gpt2")
    text_column: str = Field(
        default=job.DataSpec.text_column, description="the column that holds the text, such as text"
    )
    split: str = Field(default=job.DataSpec.split, description="the split of the data set to train on, such as train")
    held_out_split: str | None = Field(default=None, description="the split to evaluate on, such as test")
    held_out: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=job.DataSpec.held_out, description="the share held out for evaluation, such as 0.1"
    )
    name: str | None = Field(default=None, description="the name of a data set under `datasets:`, such as reviews")
    version: int | str | None = Field(default=None, description="a version of the data set, such as 3, or latest")
    held_out_path: Annotated[str, AfterValidator(references.files)] | None = Field(
        default=None, description='files to evaluate on, such as "data/test/*.jsonl"'
    )
    window: Window | None = Field(default=None, description="the rows to read, such as {last_days: 30}")
    time_column: str | None = Field(default=None, description="the column with a row's time, such as at")
    labels: list[str] = Field(
        default=[], description="the classes, in the order of their numbers, such as [negative, positive]"
    )
    padding: Padding = Field(default=job.DataSpec.padding, description=f"one of {', '.join(job.PADDINGS)}")
    sampling: Sampling = Field(default=job.DataSpec.sampling, description=f"one of {', '.join(job.SAMPLINGS)}")
    packing: bool = Field(
        default=job.DataSpec.packing,
        description="whether several samples lie in one row of seq_len tokens, which global_batch_size then counts",
    )
    text_pair_column: str | None = Field(
        default=None, description="the column that holds the second text of a pair, such as question2"
    )
    label_column: str | None = Field(
        default=None, description="the column that holds the class, or the number to predict, such as stars"
    )
    tokens_column: str | None = Field(default=None, description="the column that holds a list of words, such as words")
    input_column: str | None = Field(
        default=None, description="the column that holds the text that an encoder-decoder reads, such as article"
    )
    target_column: str | None = Field(
        default=None, description="the column that holds the text that an encoder-decoder writes, such as summary"
    )
    messages_column: str | None = Field(
        default=None, description="the column that holds a list of messages, such as conversation"
    )
    tools_column: str | None = Field(
        default=None, description="the column that holds the tools of a conversation, such as functions"
    )
    prompt_column: str | None = Field(
        default=None, description="the column that holds the text before the answer, such as question"
    )
    completion_column: str | None = Field(
        default=None, description="the column that holds the answer to learn, such as answer"
    )
    chosen_column: str | None = Field(
        default=None, description="the column that holds the answer that people prefer, such as better"
    )
    rejected_column: str | None = Field(
        default=None, description="the column that holds the other answer, such as worse"
    )
    anchor_column: str | None = Field(
        default=None, description="the column that holds the text to embed, such as query"
    )
    positive_column: str | None = Field(
        default=None, description="the column that holds the text that belongs to it, such as passage"
    )
    negative_column: str | None = Field(
        default=None, description="the column that holds a similar text that does not belong to it, such as other"
    )
    image_column: str | None = Field(
        default=None, description="the column that holds the path of an image, such as file"
    )


class DatasetVersion(Section):
    """The files of a version: either path or splits."""

    path: str | None = Field(default=None, description='files or an fsspec URL, such as "data/v1/*.jsonl"')
    splits: dict[str, str] = Field(
        default={}, description="paths by split, such as {train: data/train.jsonl, test: data/test.jsonl}"
    )
    digest: str | None = Field(
        default=None, description="the fingerprint that its content must have; `ringmaster datasets show` prints it"
    )


class Dataset(DatasetVersion):
    """A data set with a name. If it has one version only, its files may be given here."""

    versions: dict[str, DatasetVersion] = Field(
        default={}, description="the versions, the newest last, such as {1: {path: ...}, 2: {path: ...}}"
    )
    format: FileFormat | None = Field(default=None, description=f"one of {', '.join(FORMATS)}")
    columns: dict[str, ColumnType] = Field(
        default={},
        description="the type of each column that all rows have, such as {text: text, stars: integer?}",
    )
    text_column: str | None = Field(default=None, description="the column that holds the text, such as text")
    time_column: str | None = Field(default=None, description="the column with a row's time, such as at")
    held_out_split: str | None = Field(default=None, description="the split to evaluate on, such as test")
