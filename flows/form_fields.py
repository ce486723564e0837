"""The fields and sections that the forms in Prefect's UI share: titles, bounds, and the ways to give a batch."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field, WithJsonSchema
from pydantic.functional_validators import AfterValidator
from pydantic.json_schema import SkipJsonSchema

from ringmaster.flows.batch.batch_input import as_batch
from ringmaster.flows.settings import EXAMPLES
from ringmaster.tasks.batch import Batch, load_batch, parse_batch
from ringmaster.tasks.batch.references import one_of
from ringmaster.techniques.job_features import NAME_PATTERN

HIDDEN = cast(Any, SkipJsonSchema)()
"""Metadata of the type of a parameter that few users change: the form does not show it, but a run may be given it."""


def titled(title: str, **bounds: Any) -> Any:
    """Returns the metadata of a parameter's type: the title of its field, and the bounds of its values.

    Prefect uses the name of a parameter as its title, whatever `Field.title` says. An entry of the JSON schema wins.
    """
    return Field(json_schema_extra={"title": title}, **bounds)


DAY_S = 86_400.0
ANSWER_WITHIN_S = DAY_S


def example_names() -> tuple[str, ...]:
    """Returns the batch files among the examples, relative to their folder; none if they are not installed."""
    files = sorted(EXAMPLES.rglob("*.yaml"))
    is_batch = re.compile(r"^(jobs|grid):", re.MULTILINE)
    names = [file.relative_to(EXAMPLES).as_posix() for file in files if is_batch.search(file.read_text("utf-8"))]
    return tuple(sorted(names, key=lambda name: (name != "tiny_batch.yaml", name)))


ExampleName = Annotated[
    str,
    AfterValidator(one_of(example_names())),
    WithJsonSchema({"type": "string", "enum": list(example_names())} if example_names() else {"type": "string"}),
]
RunName = Annotated[str, Field(pattern=rf"^$|{NAME_PATTERN}"), HIDDEN]  # a form has a field of its own for it
Mode = Annotated[Literal["train", "dry-run", "ask"], titled("Mode")]
WithoutAnswer = Annotated[Literal["stop", "train"], titled("If nobody answers")]
AnswerWithin = Annotated[float, titled("Time to answer (seconds)", ge=1, le=30 * DAY_S)]
Resume = Annotated[bool, titled("Resume")]
CheckpointEvery = Annotated[float | None, Field(ge=0.1), HIDDEN]
Seed = Annotated[int, Field(ge=0), HIDDEN]


class FormSection(BaseModel, extra="forbid"):
    """Base class of all parts of a form."""


class ExampleBatch(FormSection, title="An example"):
    """A batch file that comes with Ringmaster."""

    example: ExampleName = Field(
        default="tiny_batch.yaml", title="Example", description="A batch file that is installed with Ringmaster."
    )

    def batch(self) -> Batch:
        """Returns the batch. Raises BatchFileError with every fault."""
        return load_batch(EXAMPLES / self.example)


class BatchOfFile(FormSection, title="A batch file"):
    """A batch file that the workers can read."""

    path: str = Field(
        min_length=1,
        title="Path",
        description="The path of the file, absolute or relative to the folder that contains RINGMASTER_HOME. All "
        "workers must be able to read it.",
    )

    def batch(self) -> Batch:
        """Returns the batch; the file may also hold a batch's JSON form. Raises BatchFileError with every fault."""
        return as_batch(self.path)


class PastedBatch(FormSection, title="Pasted text"):
    """The text of a batch file."""

    yaml: str = Field(min_length=1, title="Text", description="The complete text of a batch file, as YAML or JSON.")
    folder: str = Field(
        default=".",
        min_length=1,
        title="Folder",
        description="Relative paths and factories in the text are resolved in this folder.",
    )

    def batch(self) -> Batch:
        """Returns the batch. Raises BatchFileError with every fault."""
        return parse_batch(self.yaml, folder=Path(self.folder), name="batch")


BatchChoice = Annotated[ExampleBatch | BatchOfFile | PastedBatch, titled("Batch")]
