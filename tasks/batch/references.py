"""Validators of references in a batch file: files, folders, modules, programs and names. Pydantic calls them on values.

The user's modules are not imported. A module is located and its names are read from its source, so a check takes
milliseconds and never runs the user's code.
"""

import ast
import importlib.util
import posixpath
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from symtable import symtable
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, StringConstraints, ValidationInfo, WithJsonSchema
from pydantic.functional_validators import AfterValidator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from ringmaster.compat.python import parse_source
from ringmaster.extras import PACKAGES, install_command, missing_packages
from ringmaster.features import current_module
from ringmaster.files import is_file, path_in
from ringmaster.findings import as_list, got
from ringmaster.tasks.planning.objectives import objective_names
from ringmaster.techniques import registry
from ringmaster.techniques.checkpoints.storage import is_url
from ringmaster.techniques.data.file_patterns import matching
from ringmaster.techniques.data.images import is_image
from ringmaster.techniques.data.row_files import FORMATS, format_of
from ringmaster.techniques.data_source import ALIASES, data_source_names
from ringmaster.techniques.job_features import MAX_WHOLE, NAME_PATTERN
from ringmaster.techniques.job_specs import Adapter
from ringmaster.techniques.loss import DOTTED_NAME, DottedNames, job_named, loss_class, loss_names, options_of
from ringmaster.techniques.metric import METRIC_FAMILIES, metric_names
from ringmaster.techniques.metrics.latency import FAMILY as LATENCY
from ringmaster.techniques.metrics.latency import latency_metric
from ringmaster.techniques.models.peft_format import resolved
from ringmaster.techniques.processes.rank_environment import first_in_path
from ringmaster.text import shortened

MAX_LISTED = 16
"""The most names that a remedy lists in addition to its best guess."""
MAX_COMPARED = 2000
"""The most names among which a remedy searches for a similar one; among thousands, a file full of faults takes minutes.
"""
ELSEWHERE = "runs_elsewhere"
"""The key, in the context of a validation, of whether the job has a Python of its own."""
MAX_QUOTED = 200
"""The most characters of a value that a message quotes."""


def wrong(problem: str, remedy: str) -> PydanticCustomError:
    """Returns the error by which a validator reports its message and remedy."""
    return PydanticCustomError("reference", "{problem}", {"problem": problem, "remedy": remedy})


def closest(name: str, names: Iterable[str], *, what: str = "Use one of") -> str:
    """Returns the remedy for an unknown `name`: the most similar of `names`, and the others if they are few."""
    names = sorted(names)
    close = get_close_matches(name[:MAX_QUOTED], names[:MAX_COMPARED], n=1, cutoff=0.6)
    if close and len(names) > MAX_LISTED:
        return f"write `{close[0]}`, if that is meant"
    listed = ", ".join(names if len(names) <= 2 * MAX_LISTED else [*names[:MAX_LISTED], "..."])
    if close:
        return f"did you mean `{close[0]}`? {what} {listed}"
    return f"{what[0].lower()}{what[1:]} {listed}"


def one_of(names: Sequence[str] | Callable[[], Sequence[str]]) -> Callable[[str], str]:
    """Returns a validator that a value is one of `names`, or of those that `names` returns at the time."""

    def check(value: str) -> str:
        known = names() if callable(names) else names
        if value not in known:
            raise wrong(f"{value!r} is unknown", closest(value, known))
        return value

    return check


@dataclass(frozen=True)
class OneOf:
    """The annotation of a text that is one of `names`, for its validation and for the JSON schema."""

    names: Sequence[str]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(one_of(self.names), handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": list(self.names)}


def metric(name: str) -> str:
    """Checks that a metric is registered, or of a family, whose extra is installed."""
    family, slash, rest = name.partition("/")
    if not slash or family not in METRIC_FAMILIES.paths():
        return one_of(metric_names)(name)
    if family in PACKAGES and (missing := missing_packages(family)):
        raise wrong(f"the metric {name} needs {missing}, not installed", install_command(family))
    if posixpath.normpath(name) != name:
        problem = f"{shortened(repr(name), MAX_QUOTED)} is not a plain path"
        raise wrong(problem, "write FAMILY/NAME, such as latency/p99_s")
    if family == LATENCY:  # its names need no library
        try:
            latency_metric(rest)
        except ValueError as error:
            problem, _, remedy = str(error).partition(". To fix: ")
            raise wrong(problem, remedy) from error
    return name


def distinct(values: list[Any]) -> list[Any]:
    """Checks that no value of a list is there twice, and that no text is empty."""
    for place, value in enumerate(values):
        if value == "":
            raise wrong(f"has an empty text at place {place + 1}", "write a name there, or remove it")
        if value in values[:place]:
            raise wrong(f"has {shortened(repr(value), MAX_QUOTED)} twice", "remove one of the two")
    return values


def loss(value: Any, info: ValidationInfo) -> Any:
    """Checks a loss: its name, a mapping of its name and its options, or a dotted path. `rules` checks the options."""
    name = value.get("name") if isinstance(value, dict) else value
    if not isinstance(name, str):
        raise wrong(
            f"does not name a loss, {got(value)}", "write its name, or {name: cross-entropy, label_smoothing: 0.1}"
        )
    if ":" in name and not isinstance(value, dict):
        factory(name, info)
    elif name in loss_names() and isinstance(value, dict):
        kind = loss_class(name)
        options = {} if kind is None else options_of(kind)
        lists = [value.get(key) for key, values in options.items() if isinstance(values, DottedNames)]
        for function in [each for items in lists for each in as_list(items)]:
            # Others are reported with the options, and jobs with the parents.
            if isinstance(function, str) and DOTTED_NAME.fullmatch(function) and job_named(function) is None:
                factory(function, info)
    elif name not in loss_names():
        of_your_own = "" if isinstance(value, dict) else '; or write "package.module:function"'
        raise wrong(f"{name!r} is unknown", closest(name, loss_names()) + of_your_own)
    return value


def split_loss(loss: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the name of a loss and its options, as batch files have them."""
    if not isinstance(loss, dict):
        return loss, {}
    return loss.get("name"), {key: value for key, value in loss.items() if key != "name"}


def data_kind(name: str) -> str:
    """Checks that a data source is registered. Returns its present name for a former one."""
    return one_of(data_source_names())(ALIASES.get(name, name))


def architecture(name: str, info: ValidationInfo) -> str:
    """Checks that a Hugging Face class can be built from its config. The list of classes is imported only on use."""
    if _runs_elsewhere(info):
        return name  # the preflight checks it with the libraries of the job
    from ringmaster.techniques.models.architectures import is_architecture, known_architectures

    if not is_architecture(name):
        raise wrong(f"architecture {name!r} is unknown", closest(name, known_architectures()))
    return name


def devices(value: Any) -> Any:
    """Checks the devices that a batch requests: "auto", {"cpu": n}, {"gpu": n} or {"gpu": "all"}."""
    remedy = "write `auto`, {cpu: 2}, {gpu: 2} or {gpu: all}"
    if value == "auto":
        return value
    if not isinstance(value, dict) or len(value) != 1 or not set(value) <= {"cpu", "gpu"}:
        raise wrong(f"must be auto, or a number of cpu or gpu devices, {got(value)}", remedy)
    ((kind, number),) = value.items()
    if kind == "gpu" and number == "all":
        return value
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise wrong(f"{kind} must be a whole number of at least 1, {got(number)}", remedy)
    return value


def files(pattern: str, info: ValidationInfo) -> str:
    """Returns a glob that matches at least one file, made absolute relative to the batch file's folder.

    A URL is returned unchanged. Files must be readable, and have the section's `format` or an ending that says theirs.
    """
    absolute = pattern if is_url(pattern) else _absolute(pattern, info)
    if not is_url(pattern) and Path(absolute).is_dir():
        absolute = str(Path(absolute) / "**" / "*")
    try:
        names = matching(absolute).names
    except ValueError as error:
        message, _, remedy = str(error).partition(". To fix: ")
        if "matches no file" in message and not is_url(pattern):
            message, remedy = (
                f"{pattern!r} matches no file",
                f"name files that exist below {_folder(info)}, or an absolute path",
            )
        raise wrong(message, remedy) from None
    # In a folder of images, other files are left out.
    if not is_url(pattern) and not any(map(is_image, names)):
        _check_endings(pattern, names, info.data.get("format"))
    return absolute


def _check_endings(pattern: str, names: Sequence[str], format: str | None) -> None:
    faults = {}
    for name in names:
        try:
            format_of(name, format)
        except ValueError as error:
            faults[Path(name).suffix.lower()] = str(error).partition(". To fix: ")[2]
    if faults:
        endings = ", ".join(sorted(faults)).strip(", ") or "nothing"
        remedies = "; ".join(dict.fromkeys(faults[suffix] for suffix in sorted(faults)))
        raise wrong(f"{pattern!r} matches files that end in {endings}", remedies)


def folder(name: str, info: ValidationInfo) -> str:
    """Returns a local folder as an absolute path, or a name on the hub unchanged."""
    if name.startswith("models:/"):
        raise wrong(
            f"{name} is a registered model, and a folder is wanted",
            f"write its files to one by `ringmaster lineage restore {name.removeprefix('models:/')} FOLDER`",
        )
    path = Path(_absolute(name, info))
    if path.is_dir():
        return str(path)
    if _looks_local(name):
        raise wrong(
            f"folder {path} does not exist",
            "name an existing folder or, for one of the hub, write OWNER/NAME",
        )
    return name


def pretrained(name: str, info: ValidationInfo) -> str:
    """Returns a local folder with a model in safetensors as an absolute path, or a name on the hub unchanged."""
    if name.startswith("models:/"):
        raise wrong(
            f"{name} is a registered model, and from_pretrained reads folders and models of the hub",
            f"name it as the job's base, `base: {name}`, and give only the architecture here",
        )
    path = Path(location := folder(name, info))
    if path.is_absolute():
        if not (path / "config.json").is_file():
            raise wrong(f"{path} holds no config.json", "name a folder written by `save_pretrained`")
        if not any(path.glob("*.safetensors")):
            raise wrong(
                f"{path} holds no safetensors weights, and no other kind is read",
                "save the model again with `save_pretrained`, whose default is safetensors",
            )
    return location


def parent(name: str, info: ValidationInfo) -> str:
    """Returns a local folder with a model as an absolute path; names of jobs and registered models stay unchanged."""
    if not is_folder(name):
        return name
    path = Path(_absolute(name, info))
    if not path.is_dir():
        raise wrong(f"folder {path} does not exist", "name a job, models:/NAME@ALIAS or an existing folder")
    has_config = any((path / config_name).is_file() for config_name in ("config.json", "model.json"))
    if not has_config or not any(path.glob("*.safetensors")):
        raise wrong(f"{path} holds no model", "name a folder that `save_pretrained` or a job wrote, with safetensors")
    return str(path)


def store(name: str, info: ValidationInfo) -> str:
    """Returns a local folder with a knowledge store as an absolute path; the name of a version stays unchanged."""
    return folder(name, info) if is_folder(name) else name


def is_folder(name: str) -> bool:
    """Whether the name of a parent model is a folder's, rather than a job's."""
    return name.startswith((".", "/", "~"))


def adapter(name: str, info: ValidationInfo) -> str:
    """Returns a local folder with an adapter in peft's format as an absolute path."""
    path = Path(_absolute(name, info))
    if not path.is_dir():
        raise wrong(f"folder {path} does not exist", "name a folder that peft or a job has saved an adapter in")
    return str(agreeing(Adapter(from_pretrained=str(path))).from_pretrained)


def agreeing(adapter: Adapter) -> Adapter:
    """Completes an adapter with the settings of the folder that it continues from. Raises if the two disagree."""
    try:
        return resolved(adapter)
    except ValueError as error:
        problem, _, remedy = str(error).removeprefix("adapter: ").partition(". To fix: ")
        raise wrong(problem, remedy) from error


def command(value: Any, info: ValidationInfo) -> list[str]:
    """Returns the words of a command; those that name files below the batch file's folder become absolute."""
    try:
        words = shlex.split(value) if isinstance(value, str) else list(value)
    except (ValueError, TypeError) as error:
        raise wrong(f"cannot be divided into words: {error}", "write a command line, or a list of words") from error
    if not words or not all(isinstance(word, str) for word in words):
        raise wrong(f"must be a command line or a list of words, {got(value)}", 'write "python train.py"')
    resolved_words = [_absolute(word, info) if is_file(_folder(info), word) else word for word in words]
    # As the command will find it: the folder of the running interpreter comes first.
    is_known = resolved_words[0].startswith("{") or _runs_elsewhere(info)
    if not is_known and shutil.which(resolved_words[0], path=first_in_path(sys.executable)) is None:
        raise wrong(f"there is no program {words[0]!r}", "name one that is on the PATH, or a file that can be executed")
    missing = [word for word in resolved_words[1:] if word.endswith((".py", ".sh")) and not is_file(Path(), word)]
    if missing:
        raise wrong(f"there is no file {missing[0]!r}", f"put it into {_folder(info)}, or give its whole path")
    return resolved_words


def adopt(value: Any, info: ValidationInfo) -> str | None:
    """Returns the folder in which an unedited script runs, the batch file's, or None."""
    if value in (None, False):
        return None
    if value is not True and not Path(str(value)).is_absolute():  # as in what was checked before
        raise wrong(f"must be true or false, {got(value)}", "write true, or leave it out")
    return str(_folder(info).resolve()) if value is True else str(value)


def factory(path: str, info: ValidationInfo) -> str:
    """Checks a dotted path "package.module:function": the module is found, and its source defines the function."""
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", path):
        raise wrong(f"{path!r} is not a dotted path", 'write "package.module:function"')
    module, _, attribute = path.partition(":")
    if module == "__main__":
        raise wrong(
            f"{path} is in __main__, which the worker processes cannot import",
            "move the function into a module next to the batch file and name that module",
        )
    elsewhere = _runs_elsewhere(info)
    spec = _find(module, folder=_folder(info), is_installed=not elsewhere)
    if spec is None and elsewhere:
        return path  # the preflight imports it in the environment of the job
    if spec is None:
        raise wrong(
            f"module {module} cannot be found",
            f"put {module.partition('.')[0]}.py into {_folder(info)}, or install the package that has it",
        )
    names = _names_in(spec)
    if names is not None and attribute.partition(".")[0] not in names:
        raise wrong(
            f"{spec.origin} defines no {attribute}",
            closest(attribute, [n for n in names if not n.startswith("_")], what="It has"),
        )
    return path


def _runs_elsewhere(info: ValidationInfo) -> bool:
    """Whether the value is one of a job with a Python of its own, as `schema.JobEntry` notes in the context."""
    return bool(info.context and info.context.get(ELSEWHERE))


def _folder(info: ValidationInfo) -> Path:
    context = info.context
    assert isinstance(context, dict), "validation needs the batch file's folder as its context"
    return Path(context["folder"])


def _absolute(name: str, info: ValidationInfo) -> str:
    try:
        return str(path_in(_folder(info), name))
    except ValueError as error:
        raise wrong(f"{shortened(repr(name), MAX_QUOTED)} {error}", "name a file or folder that exists") from error


def _looks_local(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)


def _find(module: str, *, folder: Path, is_installed: bool = True) -> ModuleSpec | None:
    """Returns the spec of `module` as workers find it: on the import path, then in `folder`. Imports nothing.

    is_installed: whether workers have the import path of this process.
    """
    top, *rest = current_module(module).split(".")
    try:
        spec = importlib.util.find_spec(top) if is_installed else None
    except ValueError:  # an imported module that has lost its spec
        spec = None
    spec = spec or PathFinder.find_spec(top, [str(folder)])
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # Only the last part of the name: a dotted name would require parents that are not imported.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec


def _names_in(spec: ModuleSpec) -> set[str] | None:
    """Returns the names that a module's source binds at any depth of if, try, with and loops; None if only running it
    could show them.
    """
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None if spec.origin else set()
    try:
        source = Path(spec.origin).read_bytes()
        imports = [node for node in ast.walk(parse_source(source)) if isinstance(node, ast.ImportFrom)]
        symbols = symtable(importlib.util.decode_source(source), spec.origin, "exec").get_symbols()
    except SyntaxError as error:
        raise wrong(f"{spec.origin}:{error.lineno} is not Python: {error.msg}", "mend the module") from error
    names = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    is_open = "__getattr__" in names or any(alias.name == "*" for node in imports for alias in node.names)
    return None if is_open else names


COLUMN_TYPES = tuple(
    kind + mark for kind in ("text", "integer", "number", "boolean", "time", "tokens", "any") for mark in ("", "?")
)
"""The types of a data set's column; with "?" its values may be missing or null."""

NAME_REMEDY = "use letters, digits, '-', '_' and '.', at most 100, and begin with a letter or digit"


MODULE_PATTERN = r"^\w+(\.\w+)*$"
MAX_EPOCHS = 10**6

Distinct = AfterValidator(distinct)
"""The annotation of a list whose values must differ."""
Whole = Annotated[int, Field(ge=1, le=MAX_WHOLE)]
Positive = Annotated[float, Field(gt=0)]
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Factory = Annotated[str, AfterValidator(factory)]
Folder = Annotated[str, AfterValidator(folder)]
Adopt = Annotated[Any, AfterValidator(adopt), WithJsonSchema({"type": "boolean"})]
Command = Annotated[
    Any,
    AfterValidator(command),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}),
]
DataKind = Annotated[
    str,
    AfterValidator(data_kind),
    WithJsonSchema(
        {"anyOf": [{"enum": list(data_source_names())}, {"enum": list(ALIASES), "deprecated": True}], "type": "string"}
    ),
]
ModuleName = Annotated[str, StringConstraints(pattern=MODULE_PATTERN)]
Pattern = Annotated[str, StringConstraints(pattern=r"^[^!\s]\S*$")]
Parent = Annotated[str, AfterValidator(parent)]
Metric = Annotated[str, AfterValidator(metric), WithJsonSchema({"enum": list(metric_names()), "type": "string"})]
ANY_METRIC = {"anyOf": [{"enum": list(metric_names())}, {"pattern": "^[a-z-]+/.+$"}], "type": "string"}
EvaluationMetric = Annotated[str, AfterValidator(metric), WithJsonSchema(ANY_METRIC)]
Loss = Annotated[
    Any,
    AfterValidator(loss),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(loss_names())},
                {"type": "string", "pattern": f"^{DOTTED_NAME.pattern}$"},
                {
                    "type": "object",
                    "properties": {"name": {"enum": list(loss_names()), "type": "string"}},
                    "required": ["name"],
                },
            ]
        }
    ),
]
Objective = Annotated[str, AfterValidator(one_of(objective_names))]
Technique = Annotated[
    str, AfterValidator(one_of(registry.names)), WithJsonSchema({"enum": list(registry.names()), "type": "string"})
]
FileFormat = Annotated[str, OneOf(FORMATS)]
Devices = Annotated[
    Any,
    AfterValidator(devices),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": "auto"},
                {
                    "type": "object",
                    "properties": {
                        "cpu": {"type": "integer", "minimum": 1},
                        "gpu": {"anyOf": [{"type": "integer", "minimum": 1}, {"const": "all"}]},
                    },
                    "additionalProperties": False,
                    "minProperties": 1,
                    "maxProperties": 1,
                },
            ]
        }
    ),
]
