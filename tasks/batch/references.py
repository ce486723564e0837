"""What a value of a batch file refers to: does it exist? Pydantic calls these on single values.

Nothing of the user's is imported here: a module is found and its names are read from its source, so that a
check costs milliseconds and never runs the user's code.
"""

import ast
import glob
import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from pydantic import ValidationInfo
from pydantic_core import PydanticCustomError

from ringmaster.tasks.batch.faults import got
from ringmaster.tasks.files import beside, is_file
from ringmaster.tasks.messages import shortened
from ringmaster.techniques import registry
from ringmaster.techniques.adapters.peft_format import resolved
from ringmaster.techniques.engine.data.files import is_url, matching
from ringmaster.techniques.engine.data.rows import SUFFIXES
from ringmaster.techniques.job import Adapter

MAX_LISTED = 16
"""Names that a remedy lists beside its best guess."""
MAX_COMPARED = 2000
"""Names among which a remedy looks for the nearest: among thousands that takes minutes for a file full of faults."""
MAX_QUOTED = 200
"""Characters of a value that a message quotes."""


def wrong(problem: str, remedy: str) -> PydanticCustomError:
    """The error by which a validator tells its message and remedy."""
    return PydanticCustomError("reference", "{problem}", {"problem": problem, "remedy": remedy})


def closest(name: str, names: Iterable[str], *, what: str = "Use one of") -> str:
    """The remedy for an unknown `name`: the nearest of `names`, and the others while they are few."""
    names = sorted(names)
    close = get_close_matches(name[:MAX_QUOTED], names[:MAX_COMPARED], n=1, cutoff=0.6)
    if close and len(names) > MAX_LISTED:
        return f"write `{close[0]}`, if that is meant"
    listed = ", ".join(names if len(names) <= 2 * MAX_LISTED else [*names[:MAX_LISTED], "..."])
    if close:
        return f"did you mean `{close[0]}`? {what} {listed}"
    return f"{what[0].lower()}{what[1:]} {listed}"


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """A check that a value is one of `names`."""

    def check(value: str) -> str:
        if value not in names:
            raise wrong(f"{value!r} is unknown", closest(value, names))
        return value

    return check


def technique(name: str) -> str:
    """A technique that the registry knows."""
    return one_of(registry.names())(name)


def architecture(name: str) -> str:
    """A Hugging Face class that can be built from its config; imports what knows them only now."""
    from ringmaster.techniques.engine.models import known_architectures

    known = known_architectures()
    if name not in known:
        raise wrong(f"architecture {name!r} is unknown", closest(name, known))
    return name


def devices(value: Any) -> Any:
    """The devices that a batch asks for: "auto", {"cpu": n}, {"gpu": n} or {"gpu": "all"}."""
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
    """A glob, absolute, that matches at least one file. Relative ones start in the batch file's folder.

    A URL stays as it is; it must be readable, and match a file.
    """
    if is_url(pattern):
        try:
            matching(pattern)
        except ValueError as error:
            message, _, remedy = str(error).partition(". To fix: ")
            raise wrong(message, remedy) from None
        return pattern
    absolute = _absolute(pattern, info)
    matches = glob.iglob(absolute, recursive=True)  # noqa: PTH207 (Path.glob takes no absolute patterns)
    found = [path for match in matches if (path := Path(match)).is_file()]
    if not found:
        raise wrong(
            f"{pattern!r} matches no file",
            f"name files that exist below {_folder(info)}, or an absolute path",
        )
    if unknown := sorted({path.suffix for path in found} - set(SUFFIXES)):
        raise wrong(
            f"{pattern!r} matches files that end in {', '.join(unknown) or 'nothing'}",
            f"name files that end in {', '.join(SUFFIXES)}",
        )
    return absolute


def folder(name: str, info: ValidationInfo) -> str:
    """A local folder, made absolute, or a name on the hub, left as it is."""
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
    """A local folder that holds a model as safetensors, made absolute, or a name on the hub."""
    path = Path(found := folder(name, info))
    if path.is_absolute():
        if not (path / "config.json").is_file():
            raise wrong(f"{path} holds no config.json", "name a folder written by `save_pretrained`")
        if not any(path.glob("*.safetensors")):
            raise wrong(
                f"{path} holds no safetensors weights, and no other kind is read",
                "save the model again with `save_pretrained`, whose default is safetensors",
            )
    return found


def parent(name: str, info: ValidationInfo) -> str:
    """A folder that holds a model, made absolute; names of jobs and of registered models are left as they are."""
    if not is_folder(name):
        return name
    path = Path(_absolute(name, info))
    if not path.is_dir():
        raise wrong(f"folder {path} does not exist", "name a job, models:/NAME@ALIAS or an existing folder")
    if not any((path / said).is_file() for said in ("config.json", "model.json")) or not any(
        path.glob("*.safetensors")
    ):
        raise wrong(f"{path} holds no model", "name a folder that `save_pretrained` or a job wrote, with safetensors")
    return str(path)


def is_folder(name: str) -> bool:
    """Whether the name of a model that another comes from is a folder's, and no job's."""
    return name.startswith((".", "/", "~"))


def adapter(name: str, info: ValidationInfo) -> str:
    """A local folder that holds an adapter in peft's format, made absolute."""
    path = Path(_absolute(name, info))
    if not path.is_dir():
        raise wrong(f"folder {path} does not exist", "name a folder that peft or a job has saved an adapter in")
    return str(agreeing(Adapter(from_pretrained=str(path))).from_pretrained)


def agreeing(said: Adapter) -> Adapter:
    """The adapter with all that the folder it goes on from says, if any, with which it must agree."""
    try:
        return resolved(said)
    except ValueError as error:
        problem, _, remedy = str(error).removeprefix("adapter: ").partition(". To fix: ")
        raise wrong(problem, remedy) from error


def command(value: Any, info: ValidationInfo) -> list[str]:
    """The words of a command; those that name files below the batch file's folder become absolute."""
    try:
        words = shlex.split(value) if isinstance(value, str) else list(value)
    except (ValueError, TypeError) as error:
        raise wrong(f"cannot be divided into words: {error}", "write a command line, or a list of words") from error
    if not words or not all(isinstance(word, str) for word in words):
        raise wrong(f"must be a command line or a list of words, {got(value)}", 'write "python train.py"')
    found = [_absolute(word, info) if is_file(_folder(info), word) else word for word in words]
    # As the command will find it: what runs us comes first.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if not found[0].startswith("{") and shutil.which(found[0], path=path) is None:
        raise wrong(f"there is no program {words[0]!r}", "name one that is on the PATH, or a file that can be executed")
    missing = [word for word in found[1:] if word.endswith((".py", ".sh")) and not is_file(Path(), word)]
    if missing:
        raise wrong(f"there is no file {missing[0]!r}", f"put it into {_folder(info)}, or give its whole path")
    return found


def factory(path: str, info: ValidationInfo) -> str:
    """A dotted path "package.module:function" whose module is found and whose source has the function."""
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", path):
        raise wrong(f"{path!r} is no dotted path", 'write "package.module:function"')
    module, _, attribute = path.partition(":")
    if module == "__main__":
        raise wrong(
            f"{path} is in __main__, which the worker processes cannot import",
            "move the function into a module beside the batch file and name that module",
        )
    spec = _find(module, folder=_folder(info))
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


def _folder(info: ValidationInfo) -> Path:
    context = info.context
    assert isinstance(context, dict), "validation needs the batch file's folder as its context"
    return Path(context["folder"])


def _absolute(name: str, info: ValidationInfo) -> str:
    try:
        return str(beside(_folder(info), name))
    except ValueError as error:
        raise wrong(f"{shortened(repr(name), MAX_QUOTED)} {error}", "name a file or folder that exists") from error


def _looks_local(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)


def _find(module: str, *, folder: Path) -> ModuleSpec | None:
    """The spec of `module`, looked up as workers will: the import path, then `folder`. Imports nothing."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # an imported module that has lost its spec
        spec = None
    spec = spec or PathFinder.find_spec(top, [str(folder)])
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # By its last name alone: a dotted one would ask for parents that are not imported.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec


def _names_in(spec: ModuleSpec) -> set[str] | None:
    """The names that a module's source defines, or None where only running it could tell."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None if spec.origin else set()
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except SyntaxError as error:
        raise wrong(f"{spec.origin}:{error.lineno} is not Python: {error.msg}", "mend the module") from error
    names = set(_defined(tree.body))
    return None if names & {"*", "__getattr__"} else names


def _defined(body: Iterable[ast.AST]) -> Iterable[str]:
    """The names that statements bind in a module, those inside if, try, with and loops included."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                yield node.id
        elif not isinstance(node, ast.Lambda):
            yield from _defined(ast.iter_child_nodes(node))
