"""Foreign text leaves Ringmaster through `flows/output.py` and `ringmaster/text.py` only, checked on the sources."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.project.test_architecture import IMPORT_ROOT, PACKAGES, ROOT, modules

OUTPUT, TEXT = "flows/output.py", f"src/{IMPORT_ROOT}/text.py"
# What writes to a stream itself, and why it may.
WRITERS = {
    OUTPUT: "the one place",
    "flows/entry.py": "ends before any library is imported, with a text of our own",
    "flows/interrupts.py": "answers a signal past the locks of Python's streams, with printable text",
    "tasks/batch/reference.py": "prints the documentation of batch files, which is our own text",
    "techniques/estimates/device_rates.py": "runs in a worker process, whose stderr is a log file",
    "techniques/estimates/memory.py": "runs in a worker process, whose stderr is a log file",
    "techniques/training/calibration.py": "runs in a process of its own, whose parent reads its stdout",
    "techniques/processes/forkserver.py": "runs in a worker process, whose stderr is a log file",
    "techniques/processes/forkserver_client.py": "sends heartbeats to the fork server through a pipe",
    "flows/services/supervisor.py": "wakes its own loop through a pipe",
}
READ_MARKUP = {"Panel", "TextColumn", "Prompt", "Confirm", "IntPrompt", "RichHandler"}
"""Parts of rich that read markup in strings, or print foreign text themselves."""


def faults_of(tree: ast.AST, file: str) -> Iterator[tuple[int, str]]:
    """Yields (line, fault) for each way past the two modules."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if module == "rich.markup" or "rich.markup" in names or (module == "rich" and "print" in names):
            yield node.lineno, "rich's markup"
        if file != TEXT and module in ("html", "xml.sax.saxutils") and {"escape", "quoteattr"} & set(names):
            yield node.lineno, f"escapes outside of {TEXT}"
        if isinstance(node, ast.Attribute | ast.Name) and _name(node) == "from_markup":
            yield node.lineno, "rich's markup"
        if isinstance(node, ast.Call):
            yield from ((node.lineno, fault) for fault in _faults_of_call(node, file))


def _faults_of_call(call: ast.Call, file: str) -> Iterator[str]:
    name, of = _name(call.func), ast.unparse(call.func)
    foreign = [argument for argument in call.args if not isinstance(argument, ast.Constant)]
    if file != OUTPUT:
        if {keyword.arg for keyword in call.keywords} & {"markup", "emoji", "highlight"}:
            yield "says whether a console reads markup, which none does"
        if name in ("Console", "TextConsole"):
            yield "makes a console"
        if name in READ_MARKUP:
            yield f"{name} reads markup"
        if name == "Text" and foreign:
            yield "makes a rich Text of foreign text"
        if name == "status" and "console" in of.lower() and not _is_styled(call.args[:1]):
            yield "a status reads markup in a string"
        if name == "Spinner" and not _is_styled([k.value for k in call.keywords if k.arg == "text"]):
            yield "a spinner reads markup in a string"
    if file not in WRITERS:
        if of in ("sys.stdout.write", "sys.stderr.write", "typer.echo", "typer.secho", "click.echo", "os.write"):
            yield f"{of} outside of {OUTPUT}"
        if of == "print" and foreign:
            yield f"prints outside of {OUTPUT}"


def _is_styled(arguments: list[ast.expr]) -> bool:
    return all(isinstance(each, ast.Constant) or "styled(" in ast.unparse(each) for each in arguments)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def shipped() -> list[Path]:
    base = [path.relative_to(ROOT) for path in (ROOT / "src" / IMPORT_ROOT).glob("*.py")]
    return [*modules(ROOT, PACKAGES), *base]


def test_foreign_text_leaves_through_one_place():
    found = [
        f"{file}:{line}: {fault}"
        for file in shipped()
        for line, fault in faults_of(ast.parse((ROOT / file).read_text()), str(file))
    ]
    assert not found, "\n".join([*found, f"To fix: print by {OUTPUT}, and escape by {TEXT}"])


def test_each_exception_is_still_one():
    assert [file for file in WRITERS if not (ROOT / file).is_file()] == []
    for file in WRITERS:
        source = (ROOT / file).read_text()
        assert any(word in source for word in ("print(", ".write(", "os.write(")), file


@pytest.mark.parametrize(
    "source",
    [
        "from rich.text import Text\nText.from_markup(name)",
        "from rich.markup import escape",
        "import rich.markup",
        "from rich import print",
        "from html import escape",
        "from xml.sax.saxutils import escape",
        "console.print(name, markup=True)",
        "console.print(name, highlight=False)",
        "from rich.console import Console\nConsole()",
        "TextColumn('[bold]{task.description}')",
        "Panel(name)",
        "Text(f'{name} ends')",
        "console.status(f'reading {name}')",
        "Spinner('dots', text=name)",
        "print(name)",
        "print(f'{name} ends')",
        "import sys\nsys.stdout.write(name)",
        "import sys\nsys.stderr.write(name)",
        "typer.echo(name)",
        "os.write(2, name)",
    ],
)
def test_a_way_past_it_is_found(source: str):
    assert [line for line, _ in faults_of(ast.parse(source), "flows/a.py")] == [len(source.splitlines())]


@pytest.mark.parametrize(
    "source",
    [
        "error_console().print(f'{name} ends', style='red')",
        "console.status(styled(f'reading {name}'))",
        "Text('nothing')",
        "print('ready', flush=True)",
        "re.escape(name)",
        "Table(name)",
    ],
)
def test_what_leaves_through_it_is_let_alone(source: str):
    assert list(faults_of(ast.parse(source), "flows/a.py")) == []
