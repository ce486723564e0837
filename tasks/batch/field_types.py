"""Types of the values in a batch file, with the validation of single values."""

import re
from typing import Annotated, Any

from pydantic import Field, StringConstraints, WithJsonSchema
from pydantic.functional_validators import AfterValidator

from ringmaster.tasks.batch import references
from ringmaster.techniques import job
from ringmaster.techniques.data import SOURCES
from ringmaster.techniques.data.row_files import FORMATS
from ringmaster.techniques.data_source import data_source_names
from ringmaster.techniques.loss import loss_names
from ringmaster.techniques.metric import metric_names

COLUMN_TYPES = tuple(
    kind + mark for kind in ("text", "integer", "number", "boolean", "time", "tokens", "any") for mark in ("", "?")
)
"""The types of a data set's column; with "?" its values may be missing or null."""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
"""Of what becomes a folder, an address or a key: a batch, a job, a user, a node. Names that are only shown follow
`ringmaster.text.is_printable_name`: data sets, models, and the ids of planning problems."""
NAME_REMEDY = "use letters, digits, '-', '_' and '.', at most 100, and begin with a letter or digit"


def is_name(text: object) -> bool:
    """Whether a text follows NAME_PATTERN."""
    return isinstance(text, str) and re.fullmatch(NAME_PATTERN, text) is not None


MOST_WHOLE = 2**31 - 1
MOST_AT_ONCE = 2**24
"""The most samples of a step, tokens of a sample, and tokens of a vocabulary: memory is reserved by these numbers."""
MOST_EPOCHS = 10**6

Whole = Annotated[int, Field(ge=1, le=MOST_WHOLE)]
Positive = Annotated[float, Field(gt=0)]
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Kwargs = dict[str, Any]
Factory = Annotated[str, AfterValidator(references.factory)]
Folder = Annotated[str, AfterValidator(references.folder)]
Command = Annotated[
    Any,
    AfterValidator(references.command),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}),
]


Source = Annotated[
    str,
    AfterValidator(references.one_of(tuple(SOURCES))),
    WithJsonSchema({"enum": list(SOURCES)}),
]
DataKind = Annotated[
    str, AfterValidator(references.data_kind), WithJsonSchema({"enum": list(data_source_names()), "type": "string"})
]
Padding = Annotated[str, AfterValidator(references.one_of(job.PADDINGS)), WithJsonSchema({"enum": list(job.PADDINGS)})]
Sampling = Annotated[
    str, AfterValidator(references.one_of(job.SAMPLINGS)), WithJsonSchema({"enum": list(job.SAMPLINGS)})
]
Initialization = Annotated[
    str, AfterValidator(references.one_of(job.INITIALIZATIONS)), WithJsonSchema({"enum": list(job.INITIALIZATIONS)})
]
Quantization = Annotated[str, AfterValidator(references.one_of((job.NF4,))), WithJsonSchema({"enum": [job.NF4]})]
BaseAdapter = Annotated[
    str, AfterValidator(references.one_of(job.BASE_ADAPTERS)), WithJsonSchema({"enum": list(job.BASE_ADAPTERS)})
]
AdapterKind = Annotated[
    str, AfterValidator(references.one_of(job.ADAPTERS)), WithJsonSchema({"enum": list(job.ADAPTERS)})
]
ModuleName = Annotated[str, StringConstraints(pattern=r"^\w+(\.\w+)*$")]
Precision = Annotated[
    str, AfterValidator(references.one_of(job.PRECISIONS)), WithJsonSchema({"enum": list(job.PRECISIONS)})
]
Communication = Annotated[
    str, AfterValidator(references.one_of(job.COMMUNICATIONS)), WithJsonSchema({"enum": list(job.COMMUNICATIONS)})
]
Attention = Annotated[
    str, AfterValidator(references.one_of(job.ATTENTIONS)), WithJsonSchema({"enum": list(job.ATTENTIONS)})
]
OptimizerName = Annotated[
    str, AfterValidator(references.one_of(job.OPTIMIZERS)), WithJsonSchema({"enum": list(job.OPTIMIZERS)})
]
ScheduleName = Annotated[
    str, AfterValidator(references.one_of(job.SCHEDULES)), WithJsonSchema({"enum": list(job.SCHEDULES)})
]
Pattern = Annotated[str, StringConstraints(pattern=r"^[^!\s]\S*$")]
FreezePattern = Annotated[str, StringConstraints(pattern=r"^!?[^!\s]\S*$")]
AdaptationKind = Annotated[
    str, AfterValidator(references.one_of(tuple(job.ADAPTATIONS))), WithJsonSchema({"enum": list(job.ADAPTATIONS)})
]
METHODS = tuple(method for methods in job.ADAPTATIONS.values() for method in methods)
Method = Annotated[str, AfterValidator(references.one_of(METHODS)), WithJsonSchema({"enum": list(METHODS)})]
Parent = Annotated[str, AfterValidator(references.parent)]
Metric = Annotated[
    str, AfterValidator(references.metric), WithJsonSchema({"enum": list(metric_names()), "type": "string"})
]
Loss = Annotated[
    Any,
    AfterValidator(references.loss),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "properties": {"name": {"enum": list(loss_names()), "type": "string"}},
                    "required": ["name"],
                },
            ]
        }
    ),
]
Objective = Annotated[str, AfterValidator(references.objective)]
FileFormat = Annotated[str, AfterValidator(references.one_of(FORMATS)), WithJsonSchema({"enum": list(FORMATS)})]
ColumnType = Annotated[
    str, AfterValidator(references.one_of(COLUMN_TYPES)), WithJsonSchema({"enum": list(COLUMN_TYPES)})
]
Devices = Annotated[
    Any,
    AfterValidator(references.devices),
    WithJsonSchema({"examples": ["auto", {"cpu": 2}, {"gpu": "all"}]}),
]
