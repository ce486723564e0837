"""Registry of data sources: the built-in ones, and those of installed distributions."""

from __future__ import annotations

from ringmaster.techniques.interface.data_source import DataSource
from ringmaster.techniques.interface.job import DataSpec
from ringmaster.techniques.interface.registry import find, installed, make

ENTRY_POINT_GROUP = "ringmaster.data_sources"

BUILTIN: dict[str, str] = {
    "language-modeling": "ringmaster.techniques.data.sources.text_files:TextFiles",
    "text-classification": "ringmaster.techniques.data.sources.text_classification:TextClassification",
    "text-regression": "ringmaster.techniques.data.sources.text_regression:TextRegression",
    "token-classification": "ringmaster.techniques.data.sources.token_classification:TokenClassification",
    "seq2seq": "ringmaster.techniques.data.sources.seq2seq:Seq2Seq",
    "chat": "ringmaster.techniques.data.sources.chat:Chat",
    "completion": "ringmaster.techniques.data.sources.completion:Completion",
    "preference": "ringmaster.techniques.data.sources.preference:Preference",
    "prompt": "ringmaster.techniques.data.sources.prompt:Prompt",
    "embedding": "ringmaster.techniques.data.sources.embedding:Embedding",
    "image-classification": "ringmaster.techniques.data.sources.image_classification:ImageClassification",
    "hugging-face": "ringmaster.techniques.data.sources.hugging_face:HuggingFace",
    "python-stdlib": "ringmaster.techniques.data.sources.python_stdlib:PythonStdlib",
    "digits": "ringmaster.techniques.data.sources.digits:Digits",
    "command": "ringmaster.techniques.data.sources.commands:CommandsOwn",
    "factory": "ringmaster.techniques.data.sources.factories:Factory",
}

SOURCES = ("python-stdlib", "digits", "command")
"""The values of `DataSpec.source`."""

DEFAULTS = {"path": "language-modeling", "dataset": "hugging-face", "factory": "factory"}
"""The data source of each field of a `DataSpec` where the spec names none."""


LANGUAGE_MODELING = "language-modeling"
ALIASES = {"text": LANGUAGE_MODELING}
"""Former names of kinds."""


def data_source_names() -> tuple[str, ...]:
    """Returns the names of all data sources, built-in ones first."""
    return tuple(_every())


def data_source_named(name: str) -> DataSource:
    """Returns a data source. Raises ValueError where no data source, or a faulty one, has the name."""
    # Entry points are searched for other names only: that takes a tenth of a second, in each rank.
    path = BUILTIN[name] if name in BUILTIN else find("kind of data", name, _every())
    source: DataSource = make(DataSource, path)
    if source.name != name:
        raise ValueError(
            f"entry point {name!r} has the data source {source.name!r} ({path}). To fix: give both one name"
        )
    return source


def data_source_of(spec: DataSpec) -> DataSource:
    """Returns the data source that makes the samples of a spec.

    Raises ValueError where the spec names none or several, or does not say where the rows of one are.
    """
    given = [name for name in ("source", *DEFAULTS) if getattr(spec, name) is not None]
    said = "none" if not given else " and ".join(given)
    kind = ALIASES.get(spec.kind or "", spec.kind)
    if kind is not None and not (kind == LANGUAGE_MODELING and len(given) == 1 and given[0] in ("source", "dataset")):
        source = data_source_named(kind)
        if len(given) != min(len(source.reads), 1) or not set(given) <= set(source.reads):
            wanted = f"exactly one of {', '.join(source.reads)}" if source.reads else "none of them"
            raise ValueError(f"data: {said} given with kind {spec.kind}. To fix: give {wanted}")
        return source
    if len(given) != 1:
        raise ValueError(f"data: {said} given. To fix: give exactly one of source, path, dataset and factory")
    if spec.source is not None:
        find("source", spec.source, {name: BUILTIN[name] for name in SOURCES})
        return data_source_named(spec.source)
    return data_source_named(DEFAULTS[given[0]])


def installed_source(spec: DataSpec) -> str | None:
    """Returns the dotted path of the class of an installed data source that a spec names; None for built-in ones."""
    return None if spec.kind is None or spec.kind in BUILTIN else find("kind of data", spec.kind, _every())


def _every() -> dict[str, str]:
    # Built-in sources come first, and cannot be shadowed.
    return {**BUILTIN, **installed(ENTRY_POINT_GROUP), **BUILTIN}
