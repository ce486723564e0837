"""What benchmarks and examples import of our packages exists, although no test imports all of them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.unit.project.test_architecture import IMPORT_ROOT, ROOT, modules


@cache
def names_in(module: str) -> frozenset[str] | None:
    """Returns the names that a module of ours binds, and its submodules; None where there is no such module."""
    file = ROOT / "src" / Path(*module.split("."))
    submodules = {path.stem for path in file.glob("*")}
    source = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    if not source.exists():
        return frozenset(submodules) if submodules else None
    bound = set(submodules)
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    return frozenset(bound)


def missing_names(source: str) -> Iterator[str]:
    """Yields what a file imports of ours and does not exist."""
    for node in ast.walk(ast.parse(source)):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if module.partition(".")[0] == IMPORT_ROOT and module != IMPORT_ROOT:
            names = names_in(module)
            yield from (f"{module}.{alias.name}" for alias in node.names if names is None or alias.name not in names)


def test_what_benchmarks_and_examples_import_exists():
    files = modules(ROOT, ("benchmarks", "examples"))
    assert {str(file): found for file in files if (found := [*missing_names((ROOT / file).read_text())])} == {}


def test_an_import_of_what_does_not_exist_is_reported():
    source = "from ringmaster.tasks.planning import solve, unknown\nfrom ringmaster.tasks.gone import it"
    assert [*missing_names(source)] == ["ringmaster.tasks.planning.unknown", "ringmaster.tasks.gone.it"]
