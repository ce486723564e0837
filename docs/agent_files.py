"""Files for coding agents, made from the pages of docs/: llms.txt (https://llmstxt.org) and a skill.

The build of the site writes them (`make docs`); so does `python docs/agent_files.py`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parent
LLMS, SKILL = "llms.txt", "skill/SKILL.md"
COMMANDS, FIRST_BATCH = "reference/command-line.md", "tutorials/first-batch.md"
OPTIONAL = "Project"
"""The part of the navigation that an agent may leave out."""
NO_PROSE = re.compile(r"[#`|!*:<>-]|    |\d+\.|ringmaster ")
"""How blocks begin that are no prose: headings, code, tables, lists, pictures, references."""
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")

FRONT_MATTER = """---
name: ringmaster
description: Train, tune, evaluate, compare and retrain deep-learning models with the command `ringmaster`. Use it where
  a project has Ringmaster's batch files (YAML with `jobs:` or `grid:`), or where several models are to be trained on
  the devices of a machine or a cluster.
---
"""
ADVICE = """Before a file is run, check it: `ringmaster run FILE --dry-run --json` names all faults, each with its line
and a remedy. `ringmaster schema` prints the JSON schema of batch files, with every key, its type and its meaning;
`ringmaster schema sweep`, `retraining`, `policy`, `tests` and `endpoint` print those of the other files."""


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, which names functions by tags."""


_Loader.add_multi_constructor("", lambda loader, suffix, node: None)


def files() -> dict[str, str]:
    """Returns the content of each file, by its path in docs/."""
    return {LLMS: llms_txt(), SKILL: skill()}


def write() -> None:
    """Writes the files whose content differs."""
    for name, text in files().items():
        path = DOCS / name
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)


def llms_txt() -> str:
    """Returns the list of all pages of the navigation, with the first sentence of each."""
    navigation = yaml.load((DOCS.parent / "mkdocs.yml").read_text(), Loader=_Loader)["nav"]  # noqa: S506 - a safe one
    parts = [f"# {_title('index.md')}", f"> {_paragraph('index.md')}", ADVICE]
    for section in navigation:
        ((title, entry),) = section.items()
        if isinstance(entry, list):
            lines = [f"- [{_title(page)}]({page}): {_sentence(page)}".removesuffix(": ") for page in _pages(entry)]
            parts.append(f"## {'Optional' if title == OPTIONAL else title}\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _pages(entry: Any) -> Iterator[str]:
    """Yields the pages of an entry of the navigation that are files of docs/; a * matches several."""
    if isinstance(entry, dict):
        for inner in entry.values():
            yield from _pages(inner)
    elif isinstance(entry, list):
        for inner in entry:
            yield from _pages(inner)
    elif "*" in entry:
        yield from sorted(page.relative_to(DOCS).as_posix() for page in DOCS.glob(entry))
    elif (DOCS / entry).exists():
        yield entry


def skill() -> str:
    """Returns the skill: how a batch file is written, how results are read, and what the commands are."""
    panels = re.findall(r"^## (.+)$", _text(COMMANDS), re.MULTILINE)
    results = ("Exit codes", "Result of a batch")
    parts = [
        f"# {_title('index.md')}",
        _paragraph("index.md"),
        "## Write a batch file",
        _section(FIRST_BATCH, "Describe the jobs"),
        ADVICE,
        "## Train",
        _section(FIRST_BATCH, "Train"),
        "## Read the results",
        *(_section(COMMANDS, title) for title in reversed(results)),
        "## Commands",
        *(f"### {title}\n\n{_section(COMMANDS, title)}" for title in panels if title not in results),
        "## More",
        "`docs/llms.txt` lists all pages of the documentation.",
    ]
    return FRONT_MATTER + "\n" + "\n\n".join(parts) + "\n"


def _text(page: str) -> str:
    return (DOCS / page).read_text()


def _title(page: str) -> str:
    return _text(page).partition("\n")[0].removeprefix("# ")


def _section(page: str, title: str) -> str:
    """Returns a section of a page, with the paths of pages in place of links."""
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", _text(page), re.MULTILINE | re.DOTALL)
    assert match is not None, f"docs/{page} has no section {title!r}"
    folder = posixpath.join("docs", posixpath.dirname(page))
    return LINK.sub(lambda link: _named(link[1], link[2], folder), match[1].strip("\n"))


def _named(text: str, target: str, folder: str) -> str:
    if ":" in target:
        return f"{text} ({target})"
    return f"{text} (`{posixpath.normpath(posixpath.join(folder, target.partition('#')[0]))}`)"


def _paragraph(page: str) -> str:
    """Returns the paragraph below the title of a page, as text; "" where something else is there."""
    blocks = re.split(r"\n\n+", _text(page), maxsplit=2)
    is_prose = len(blocks) > 1 and not NO_PROSE.match(blocks[1])
    return LINK.sub(r"\1", " ".join(blocks[1].split())) if is_prose else ""


def _sentence(page: str) -> str:
    """Returns the first sentence of a page or, where it begins with none, its headings."""
    headings = re.findall(r"^## (.+)$", _text(page), re.MULTILINE)
    return re.split(r"(?<=[.:])\s", _paragraph(page), maxsplit=1)[0].removesuffix(":") or "; ".join(headings)


if __name__ == "__main__":
    write()
