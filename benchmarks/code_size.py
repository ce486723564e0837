"""Counts of the shipped code and of the documentation: how much there is to read, and how distinct names are.

    python -m benchmarks.code_size

Statements are counted without docstrings. A name is counted twice if two classes have it.
"""

from __future__ import annotations

import ast
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ("flows", "tasks", "techniques", "model_lineage", "src")


def main() -> None:
    """Prints the counts."""
    for what, number in counts(ROOT).items():
        print(f"{number:>8,}  {what}" if isinstance(number, int) else f"{number:>8.1f}  {what}")


def counts(root: Path) -> Mapping[str, int | float]:
    """Returns each count by what it counts."""
    files = {file: (root / file).read_text() for file in tracked(root, SHIPPED, suffix=".py")}
    trees = {file: ast.parse(text) for file, text in files.items()}
    lines = [len(text.splitlines()) for text in files.values() if text]
    statements = [node for tree in trees.values() for node in ast.walk(tree) if is_counted(node)]
    imports = [node for node in statements if isinstance(node, (ast.Import, ast.ImportFrom))]
    import_lines = sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in imports)
    classes = Counter(node.name for node in statements if isinstance(node, ast.ClassDef))
    names = Counter(Path(file).name for file in files)
    docs = {file: (root / file).read_text() for file in tracked(root, ("docs",), suffix=".md")}
    return {
        "files": len(files),
        "median lines of a file": int(statistics.median(lines)),
        "statements without docstrings": len(statements),
        "% of lines that import": 100 * import_lines / sum(lines),
        "`assert ... is not None`": sum(isinstance(node, ast.Assert) and is_not_none(node.test) for node in statements),
        "class names used twice": sum(number > 1 for number in classes.values()),
        "file names used three times": sum(
            number > 2 for name, number in names.items() if not name.startswith("__")
        ),
        "words of documentation": sum(len(text.split()) for text in docs.values()),
    }  # fmt: skip


def tracked(root: Path, folders: Iterable[str], *, suffix: str) -> list[str]:
    """Returns the files under version control with a suffix, without links."""
    found = subprocess.run(["git", "ls-files", *folders], cwd=root, check=True, capture_output=True, text=True)
    return [file for file in found.stdout.splitlines() if file.endswith(suffix) and not (root / file).is_symlink()]


def is_counted(node: ast.AST) -> bool:
    """Returns whether a node is a statement and not a docstring or another text that stands alone."""
    if not isinstance(node, ast.stmt):
        return False
    return not (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )


def is_not_none(test: ast.expr) -> bool:
    """Returns whether an expression is `... is not None`."""
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)


if __name__ == "__main__":
    main()
