"""Parser from YAML text to plain values with the line of each value.

Scalars follow the core schema of YAML 1.2 (yaml.org/spec/1.2.2, 10.3), not PyYAML's 1.1: `3e-4` is a number, and `no`,
`on` and `2026-01-01` are text, as their writers intend. JSON is a subset of YAML and is read in the same way.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import yaml

from ringmaster.findings import Finding, Location, as_mapping
from ringmaster.text import printable, shortened

MAX_PLACE, MAX_SAID = 200, 1000
"""The printed length in characters of a place, and of a message or a remedy; keys in a file may have any length."""


def place_text(place: Location) -> str:
    """Formats `place` for display: jobs[3].optimizer.lr."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


def parsed_place(text: str) -> Location:
    """Returns the place whose `place_text` is `text`; keys with dots or brackets become several."""
    return tuple(int(number) if number else key for number, key in re.findall(r"\[(\d+)\]|([^.\[\]]+)", text))


@dataclass(frozen=True)
class Fault:
    """A fault. `place` is empty for the whole file; `line` is None if there is no file.

    Prints as `mixed.yaml:12: jobs[3].optimizer.lr: must be greater than 0, got -1. To fix: ...`, on one line whatever
    characters the file holds.
    """

    place: str
    line: int | None
    message: str
    remedy: str
    file: str = ""

    def __str__(self) -> str:
        source = ":".join(str(part) for part in (self.file, self.line) if part)
        where = ": ".join(part for part in (source, shortened(self.place, MAX_PLACE)) if part)
        what = f"{shortened(self.message, MAX_SAID)}. To fix: {shortened(self.remedy, MAX_SAID)}."
        return printable(f"{where}: {what}" if where else what)


MAX_DEPTH = 50
"""The deepest nesting of lists and mappings; a batch file needs about six levels."""
MAX_VALUES = 100_000
"""The most values after the expansion of aliases: more than any real file has, less than an alias bomb expands to."""
MAX_DIGITS = 300
"""The most digits of an integer; a longer one fits neither a float nor a database."""

_FLATTER = "write flat lists of jobs, without anchors inside anchors"


@dataclass
class YamlDocument:
    """The `data` of a text, the line (from 1) of each place, and the faults of the parts that could not be read."""

    data: Any = None
    lines: dict[Location, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def line(self, place: Location) -> int | None:
        """Returns the line of `place` or, if the text lacks it, of its nearest enclosing value."""
        while place not in self.lines:
            if not place:
                return None
            place = place[:-1]
        return self.lines[place]


class FileKind(StrEnum):
    """The kinds of files that commands take."""

    BATCH = "a batch file"
    SWEEP = "a file of a sweep"
    RETRAINING = "a file of models to retrain"
    POLICY = "a policy"
    TESTS = "a file of tests"
    JOB = "a job alone"
    LUDWIG = "a Ludwig configuration"


# By kind: the keys at the top that only its files have, and where such a file goes.
_OWN_KEYS: Mapping[FileKind, tuple[frozenset[str], str]] = {
    FileKind.BATCH: (frozenset(("jobs", "grid")), "run it by `ringmaster run`"),
    FileKind.SWEEP: (frozenset(("template", "space")), "run it by `ringmaster sweep`"),
    FileKind.RETRAINING: (frozenset(("models", "night")), "run it by `ringmaster retrain`"),
    FileKind.POLICY: (frozenset(("suites", "limits", "significance")), "name it under `policy:` or after --policy"),
    FileKind.TESTS: (frozenset(("tests", "assertions")), "name it under `suites:` of a policy"),
    FileKind.JOB: (frozenset(("model", "num_steps")), "write it as an entry of `jobs:`"),
    FileKind.LUDWIG: (frozenset(("input_features", "output_features")), "run it by `ringmaster run FILE --data ROWS`"),
}


def read(text: str, *, kind: FileKind | None = None) -> YamlDocument:
    """Reads one YAML document. Faults are collected in its `findings`; nothing is raised.

    kind: what the file should be. One whose keys are those of another kind has that as its only fault.
    """
    document = YamlDocument(lines={(): 1})
    try:
        node = yaml.compose(text, Loader=_CoreLoader)
        if isinstance(node, yaml.MappingNode):
            document.data = _Reader(document).value(node, place=())
        else:
            what = "is empty" if node is None else "must be a mapping at the top"
            is_batch = kind is FileKind.BATCH
            remedy = "start with `name: my-batch` and `jobs:`" if is_batch else "give keys with values, as `key: value`"
            document.findings.append(Finding((), what, remedy))
    except yaml.MarkedYAMLError as error:
        document.findings.append(_syntax_finding(error))
    except yaml.YAMLError as error:
        message = " ".join(str(error).split())
        document.findings.append(Finding((), f"is not YAML: {message}", "write it as plain UTF-8 text"))
    except RecursionError:
        document.findings.append(Finding((), f"is nested deeper than {MAX_DEPTH} levels", _FLATTER))
    except _UnreadableError as error:
        document.findings.append(Finding((), str(error), _FLATTER, line=error.line))
    keys = as_mapping(document.data).keys()
    if kind is not None and not keys & _OWN_KEYS[kind][0]:
        for other, (own_keys, remedy) in _OWN_KEYS.items():
            if keys & own_keys:
                return YamlDocument(lines={(): 1}, findings=[Finding((), f"is {other}, not {kind}", remedy)])
    return document


class _UnreadableError(Exception):
    """A text that is nested too deeply or too large, at `line`."""

    def __init__(self, message: str, *, node: yaml.Node) -> None:
        super().__init__(message)
        self.line = node.start_mark.line + 1


class _Reader:
    """Converts nodes to values. Aliases are expanded, so that each use of an anchor has its own place."""

    def __init__(self, document: YamlDocument) -> None:
        self.document = document
        self.num_values = 0
        self.open: list[yaml.Node] = []

    def value(self, node: yaml.Node, *, place: Location) -> Any:
        self.num_values += 1
        if node in self.open:
            raise _UnreadableError("holds an alias inside its own anchor", node=node)
        if len(self.open) > MAX_DEPTH:
            raise _UnreadableError(f"is nested deeper than {MAX_DEPTH} levels", node=node)
        if self.num_values > MAX_VALUES:
            raise _UnreadableError(f"aliases make it larger than {MAX_VALUES:,} values", node=node)
        self.document.lines.setdefault(place, node.start_mark.line + 1)
        self.open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, place=place)
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, place=(*place, i)) for i, item in enumerate(node.value)]
            return self.scalar(node, place=place)
        finally:
            self.open.pop()

    def mapping(self, node: yaml.MappingNode, *, place: Location) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, item in node.value:
            if _is_merge(key):
                sources = item.value if isinstance(item, yaml.SequenceNode) else [item]
                for source in reversed(sources):
                    values.update(self.merge(source, place=place))
        own: dict[str, int] = {}
        for key, item in node.value:
            name, line = key.value, key.start_mark.line + 1
            name = self.whole(name, place=place, node=key) if isinstance(name, str) else name
            if not isinstance(name, str):
                self.add(place, "has a key that is not text", "use names as keys", node=key)
            elif name in own:
                self.add(
                    (*place, name),
                    f"occurs twice, first in line {own[name]}",
                    "keep one of the two",
                    node=key,
                )
            elif not _is_merge(key):
                own[name] = self.document.lines[(*place, name)] = line
                values[name] = self.value(item, place=(*place, name))
        return values

    def merge(self, source: yaml.Node, *, place: Location) -> dict[str, Any]:
        """Returns the values of `source` for `<<: *source`; the keys of the mapping itself take precedence."""
        if isinstance(source, yaml.MappingNode):
            return dict(self.value(source, place=place))
        self.add(place, "merges (<<) something that is not a mapping", "merge an anchored mapping", node=source)
        return {}

    def scalar(self, node: yaml.Node, *, place: Location) -> Any:
        read_scalar = _SCALARS.get(node.tag)
        if read_scalar is None:
            self.add(place, f"has the tag {shortened(node.tag, 60)}", "write plain values, without tags", node=node)
            return None
        text = self.whole(node.value, place=place, node=node)
        try:
            return read_scalar(text)
        except _TooLongError:
            self.add(place, f"is a number of more than {MAX_DIGITS} digits", "write a smaller one", node=node)
        except ValueError:
            message = f"{shortened(repr(node.value), 60)} is no {node.tag.rpartition(':')[2]}"
            self.add(place, message, "remove the tag", node=node)
        return None

    def whole(self, text: str, *, place: Location, node: yaml.Node) -> str:
        """Joins surrogate pairs in `text`: JSON escapes a character beyond 16 bits as two halves, which YAML keeps."""
        joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if "\N{REPLACEMENT CHARACTER}" in joined and "\N{REPLACEMENT CHARACTER}" not in text:
            self.add(place, "holds half a character (\\ud800 to \\udfff alone)", "write the whole one", node=node)
        return joined

    def add(self, place: Location, message: str, remedy: str, *, node: yaml.Node) -> None:
        self.document.findings.append(Finding(place, message, remedy, line=node.start_mark.line + 1))


def _is_merge(key: yaml.Node) -> bool:
    return isinstance(key, yaml.ScalarNode) and key.value == "<<" and key.style is None


class _CoreLoader(yaml.SafeLoader):
    """Resolves plain scalars by YAML 1.2's core schema. It only composes nodes and constructs no objects."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (yaml's own way)


_INT = r"[-+]?[0-9]+(?:_[0-9]+)*"
_PATTERNS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", rf"{_INT}|0x[0-9a-fA-F]+|0o[0-7]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)
for _name, _pattern, _starts in _PATTERNS:
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_pattern})\Z"), _starts)


class _TooLongError(ValueError):
    """An integer with more than MAX_DIGITS digits."""


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise _TooLongError
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


_SCALARS: dict[str, Callable[[str], Any]] = {
    "tag:yaml.org,2002:null": lambda text: None,
    "tag:yaml.org,2002:bool": lambda text: text.lower() == "true",
    "tag:yaml.org,2002:int": _int,
    "tag:yaml.org,2002:float": lambda text: float(re.sub(r"\.(inf|nan)", r"\1", text.lower())),
    "tag:yaml.org,2002:str": str,
}


def _syntax_finding(error: yaml.MarkedYAMLError) -> Finding:
    mark = error.problem_mark or error.context_mark
    message = ", ".join(part for part in (error.context, error.problem) if part)
    if error.context_mark and mark and error.context_mark.line < mark.line:
        message += f" (it begins in line {error.context_mark.line + 1})"
    remedies = {
        "\\t": "indent with spaces, not with tabs",
        "single document": "keep one document a file (remove the second `---`)",
        "undefined alias": "define the anchor (&name) before it is used (*name)",
        "": "check the indentation, colons, quotes and brackets in and above this line",
    }
    remedy = next(remedy for words, remedy in remedies.items() if words in message)
    return Finding((), f"is not YAML: {message}", remedy, line=mark.line + 1 if mark else 1)
