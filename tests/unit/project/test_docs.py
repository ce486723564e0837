"""Everything that the documents mention exists: links, files, commands, batch files and imports."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from pydantic import Field

import ringmaster
from benchmarks import readme
from ringmaster.flows import cli
from ringmaster.tasks.batch import parse_batch
from ringmaster.tasks.batch import reference as reference_page
from ringmaster.tasks.batch.reference import reference
from ringmaster.tasks.batch.sections import Section

ROOT = Path(__file__).parents[3]
FOLDERS = ("src/ringmaster", "flows", "tasks", "techniques", "model_lineage", "tests", "examples", "benchmarks")
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", *PAGES]
SOURCES = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
OURS = r"(?:flows|tasks|techniques|model_lineage|tests|examples|benchmarks|docs)/[\w./-]*"


def each(pattern: str) -> list:
    """A parameter for each match of a pattern in the documents, with the document's name as its id."""
    return [
        pytest.param(document, said, id=f"{document.name}-{said}")
        for document in DOCUMENTS
        for said in dict.fromkeys(re.findall(pattern, document.read_text(), re.MULTILINE))
    ]


def blocks(document: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("document", "link"), each(r"\]\((?!https?:)([^)\s]+)\)"))
def test_a_link_leads_somewhere_inside_the_project(document: Path, link: str):
    path, _, anchor = link.partition("#")
    target = (document.parent / path).resolve() if path else document
    assert target.exists()
    assert target.is_relative_to(ROOT)
    if anchor:
        headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize(("document", "path"), each(rf"`({OURS})`"))
def test_a_file_that_is_named_is_there(document: Path, path: str):
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("document", "pointer"), each(r"(`\w+`(?: \(|\s+in\s+)`[\w/]+\.py`)"))
def test_a_file_defines_the_name_that_is_said_to_be_in_it(document: Path, pointer: str):
    name, path = re.findall(r"`([^`]+)`", pointer)
    files = [file for file in SOURCES if file.as_posix().endswith(f"/{path}")]
    assert files, "no file has this name"
    assert any(name in _definitions(file) for file in files), f"none of {files} defines {name}"


@pytest.mark.parametrize(("document", "name"), each(r"`((?:\w+/)*\w+\.py)`"))
def test_a_module_that_is_named_is_there(document: Path, name: str):
    assert any(file.as_posix().endswith(f"/{name}") for file in SOURCES)


def _definitions(file: Path) -> set[str]:
    """Returns the names of the classes, functions and variables that a file defines at its top and in its classes."""
    names: set[str] = set()
    tree = ast.parse(file.read_text())
    for node in [*tree.body, *(each for top in tree.body if isinstance(top, ast.ClassDef) for each in top.body)]:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                names.add(node.name)
            case ast.Assign():
                names.update(target.id for target in node.targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


@pytest.mark.parametrize(("document", "target"), each(r"\bmake ([a-z]+(?:-[a-z]+)*)(?=[ `]*(?:$|`|#| {2,}|[A-Z]+=))"))
def test_a_target_of_make_that_is_named_is_there(document: Path, target: str):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("document", "command"), each(r"(?:`|^ {4}|bin/)ringmaster ([a-z]+)"))
def test_a_command_that_is_named_is_there(document: Path, command: str):
    commands = {info.name or info.callback.__name__ for info in cli.app.registered_commands if info.callback}
    assert command in commands | {group.name for group in cli.app.registered_groups}


def test_the_readme_shows_a_batch_file_that_is_right(tmp_path):
    (text,) = blocks(ROOT / "README.md", "yaml")
    for name in ("reviews.csv", "chats.jsonl"):
        (tmp_path / name).touch()
    assert len(parse_batch(text, folder=tmp_path, name="README.md").jobs) > 1


def test_the_figures_of_the_readme_are_those_that_the_benchmarks_recorded():
    text = (ROOT / "README.md").read_text()
    for name, block in readme.blocks().items():
        assert f"<!-- {name} -->\n{block}<!-- /{name} -->" in text, f"`make readme-figures BENCH=--table` writes {name}"


def test_the_readme_imports_what_there_is():
    """tests/integration/flows/test_wheel.py runs the whole README, which takes longer."""
    (source,) = blocks(ROOT / "README.md", "python")
    modules = [node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    assert modules
    assert all(importlib.util.find_spec(module) for module in modules if module)


def test_the_readme_stays_short_and_its_code_fits_a_page():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) < 900
    code = "".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert [line for line in code.splitlines() if len(line) > 100] == []


def test_the_page_of_benchmarks_has_every_block_that_a_benchmark_writes():
    sources = "".join(path.read_text() for path in sorted((ROOT / "benchmarks").rglob("*.py")))
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    names = {*re.findall(r"<!-- ([a-z][a-z-]*) -->", sources), *re.findall(r'write_section\("([a-z_-]+)"', sources)}
    assert len(names) > 25
    for name in names:
        assert re.search(rf"^<!-- {name} -->$.*^<!-- /{name} -->$", page, re.MULTILINE | re.DOTALL), name


def test_pictures_are_self_contained():
    for picture in (ROOT / "docs" / "images").glob("*.svg"):
        text = picture.read_text()
        assert "<script" not in text, picture
        assert not re.search(r"(href|src)=\"(?!#)", text), picture


def test_the_page_of_batch_files_is_what_the_schema_says():
    page = ROOT / "docs" / "batch-files.md"
    assert page.read_text() == reference(), (
        f"make it anew: python -m ringmaster.tasks.batch.reference > {page.relative_to(ROOT)}"
    )


def test_a_default_or_description_of_several_lines_stays_in_its_row():
    class OddSection(Section):
        text: str = Field(default="a\n\n| b", description="one\n| two")
        texts: list[str] = Field(default=["a\nb", "c " * 60], description="texts")

    rows = reference_page._described(OddSection).splitlines()[6:]
    assert rows == [
        r'| `text` | `"a\n\n\| b"` | one \| two |',
        rf'| `texts` | `["a\nb", "{"c " * 60}"]` | texts |',
    ]


def test_the_reference_has_every_public_name():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    assert sorted(re.findall(r"^::: ringmaster\.(\w+)$", pages, re.MULTILINE)) == sorted(ringmaster.__all__)
