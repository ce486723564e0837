"""Rules for imports between the four packages, checked on their sources."""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from ringmaster.feature_hooks import HOOKS

ROOT = Path(__file__).parents[3]
IMPORT_ROOT = "ringmaster"
PACKAGES = ("flows", "tasks", "techniques", "model_lineage")
FOLDERS = (*PACKAGES, "tests", "examples", "benchmarks")


@dataclass(frozen=True)
class Import:
    """One import in a file. Imports inside functions and calls of `import_module("...")` count too."""

    file: Path
    line: int
    module: str

    @property
    def package(self) -> str:
        """The package that imports."""
        return self.file.parts[0]

    def of(self, *names: str) -> bool:
        """Whether this imports one of the modules or a part of it. Our modules are named under their import root."""
        return any(f"{self.module}.".startswith((f"{name}.", f"{IMPORT_ROOT}.{name}.")) for name in names)

    def inside(self, *folders: str) -> bool:
        """Whether the importing file is in one of the folders."""
        return any(self.file.is_relative_to(folder) for folder in folders)


def modules(root: Path, folders: tuple[str, ...] = PACKAGES) -> list[Path]:
    return sorted(path.relative_to(root) for folder in folders for path in (root / folder).rglob("*.py"))


def imports(root: Path, folders: tuple[str, ...] = PACKAGES) -> Iterator[Import]:
    for file in modules(root, folders):
        for node in ast.walk(ast.parse((root / file).read_text())):
            for module in _imported(node, file):
                yield Import(file, node.lineno, module)


@cache
def imports_here() -> tuple[Import, ...]:
    return tuple(imports(ROOT))


def _imported(node: ast.AST, file: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = file.parts[: -node.level] if node.level else ()
        start = ".".join([*above, *([node.module] if node.module else [])])
        return [f"{start}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return [node.args[0].value] if called in ("import_module", "__import__") else []
    return []


# The imports that each package may make of the others.
ALLOWED = {
    "flows": PACKAGES,
    "tasks": ("tasks", "techniques", "model_lineage"),
    "techniques": ("techniques",),
    "model_lineage": ("model_lineage",),
}
# The folders and modules of tasks/ in layers, from below: each layer may import those below it and itself.
LAYERS = (
    ("background_worker", "cluster", "process_identity"),
    ("device_monitor", "storage"),
    ("planning",),
    ("batch", "datasets"),
    ("profiling",),
    ("execution",),
    ("control",),
    ("pool",),
    ("timeline",),
    ("alarms", "recording"),
    ("evaluation",),
    ("retraining", "sweeping"),
)
LAYER = {name: number for number, layer in enumerate(LAYERS) for name in layer}


def is_upward(found: Import) -> bool:
    """Whether a module of tasks/ imports a part of tasks/ from a layer above its own."""
    _, _, target = found.module.removeprefix(f"{IMPORT_ROOT}.").partition("tasks.")
    if found.package != "tasks" or not target or len(found.file.parts) < 2:
        return False
    own = found.file.parts[1].removesuffix(".py")
    return own in LAYER and LAYER[target.partition(".")[0]] > LAYER[own]


COMPAT = Path("src", IMPORT_ROOT, "compat")


@cache
def compat_modules(library: str) -> tuple[str, ...]:
    """The modules that hold the private names of a library, and import it: `torch` has `torch_distributed`, too."""
    stems = sorted(file.stem for file in (ROOT / COMPAT).glob("*.py"))
    return tuple(f"compat.{stem}" for stem in stems if stem == library or stem.startswith(f"{library}_"))


def uses(found: Import, *libraries: str) -> bool:
    """Whether a module imports one of the libraries, itself or by the module of its private names."""
    return found.of(*libraries, *(module for library in libraries for module in compat_modules(library)))


RULES: dict[str, Callable[[Import], bool]] = {
    "flows import tasks import techniques, both import model_lineage, and never the other way": (
        lambda i: i.of(*PACKAGES) and not i.of(*ALLOWED[i.package])
    ),
    "Prefect only in flows/ and in modules named task.py or prefect_*.py of tasks/": (
        lambda i: (
            uses(i, "prefect")
            and not (i.package == "flows" or (i.package == "tasks" and i.file.name.startswith(("task.py", "prefect_"))))
        )
    ),
    "PuLP and HiGHS only in tasks/planning/": (lambda i: i.of("pulp", "highspy") and not i.inside("tasks/planning")),
    "tasks/planning/ needs neither torch nor Prefect (but for task.py) nor MLflow": (
        lambda i: (
            i.inside("tasks/planning")
            and (uses(i, "torch", "transformers", "mlflow") or (uses(i, "prefect") and i.file.name != "task.py"))
        )
    ),
    "torch and transformers only in techniques/": (
        lambda i: uses(i, "torch", "transformers") and i.package != "techniques"
    ),
    "inside tasks/ each layer imports only layers below it": is_upward,
    "Optuna only in tasks/sweeping/": (lambda i: i.of("optuna") and not i.inside("tasks/sweeping")),
    "Ray only in its feature": (lambda i: i.of("ray")),
    "MLflow only in model_lineage/": (lambda i: uses(i, "mlflow") and i.package != "model_lineage"),
    "pydantic not in techniques/, which describes jobs with dataclasses": (
        lambda i: i.of("pydantic", "pydantic_core") and i.package == "techniques"
    ),
}


def violations(found: Iterable[Import], rule: str) -> list[str]:
    return [f"{i.file}:{i.line} imports {i.module}: {rule}" for i in found if RULES[rule](i)]


@pytest.mark.parametrize("rule", RULES)
def test_imports_keep_the_rule(rule: str):
    broken = violations(imports_here(), rule)
    assert not broken, "\n".join(broken)


BREAKS = [
    ("techniques/a.py", "from ringmaster.tasks.batch import Batch", "flows import"),
    ("techniques/a.py", "def f():\n    import model_lineage", "flows import"),
    ("model_lineage/a.py", "from techniques import Job", "flows import"),
    ("tasks/a.py", "from flows import cli", "flows import"),
    ("tasks/deep/a.py", "from ...flows import cli", "flows import"),
    ("tasks/planning/solve.py", "from prefect import task", "Prefect"),
    ("tasks/planning/solve.py", "from prefect import task", "tasks/planning/"),
    ("techniques/task.py", "import prefect.tasks", "Prefect"),
    ("techniques/prefect_events.py", "import prefect.events", "Prefect"),
    ("tasks/execution/a.py", "import pulp", "PuLP"),
    ("flows/a.py", "from highspy import Highs", "PuLP"),
    ("tasks/planning/deep/a.py", "import mlflow", "tasks/planning/"),
    ("tasks/planning/task.py", "import torch", "tasks/planning/"),
    ("tasks/evaluation/a.py", "import torch.nn as nn", "torch and"),
    ("flows/a.py", "import importlib\nx = importlib.import_module('transformers')", "torch and"),
    ("tasks/a.py", "from mlflow import MlflowClient", "MLflow only"),
    ("flows/a.py", "from ringmaster.compat.mlflow import MIGRATIONS", "MLflow only"),
    ("flows/a.py", "from ringmaster.compat import torch_distributed", "torch and"),
    ("tasks/evaluation/a.py", "from ringmaster.compat.transformers import attention_of", "torch and"),
    ("techniques/a.py", "from ringmaster.compat.prefect import STARTED_RUN", "Prefect only"),
    ("tasks/planning/a.py", "import ringmaster.compat.torch", "tasks/planning/"),
    ("tasks/pool/a.py", "import ray.util", "Ray only"),
    ("techniques/a.py", "from pydantic import BaseModel", "pydantic"),
    ("tasks/storage/a.py", "from ringmaster.tasks.pool.nodes import Nodes", "inside tasks/"),
    ("tasks/execution/deep/a.py", "from ringmaster.tasks.pool import nodes", "inside tasks/"),
    ("tasks/cluster.py", "from ringmaster.tasks.storage import schema", "inside tasks/"),
]


@pytest.mark.parametrize(("file", "source", "rule"), BREAKS, ids=lambda value: str(value).splitlines()[-1])
def test_a_broken_rule_is_told_with_file_and_line(file: str, source: str, rule: str, tmp_path: Path):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(source)
    (rule,) = (text for text in RULES if text.startswith(rule))
    (told,) = violations(imports(tmp_path), rule)
    assert told.startswith(f"{file}:{len(source.splitlines())} imports ")
    assert told.endswith(rule)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("flows/cli.py", "import prefect, ringmaster.tasks.batch, techniques, model_lineage"),
        ("tasks/planning/task.py", "from prefect import task\nfrom ringmaster.tasks.planning import solve"),
        ("tasks/planning/solve.py", "import pulp, highspy"),
        ("tasks/a.py", "import techniques, model_lineage, torchvision_like, prefecture"),
        ("techniques/a.py", "import torch\nfrom . import b"),
        ("model_lineage/a.py", "import mlflow"),
    ],
)
def test_what_keeps_the_rules_is_let_alone(file: str, source: str, tmp_path: Path):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(source)
    assert [told for rule in RULES for told in violations(imports(tmp_path), rule)] == []


def test_the_base_layer_imports_none_of_the_packages():
    """What only type checkers read is let alone, and so are the public names, which are imported when they are used."""
    base = ROOT / "src" / IMPORT_ROOT
    files = [file for file in (*base.glob("*.py"), *(ROOT / COMPAT).glob("*.py")) if file.name != "__init__.py"]
    assert files
    for file in files:
        tree = ast.parse(file.read_text())
        blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
        typing_only = {each for b in blocks if getattr(b.test, "id", "") == "TYPE_CHECKING" for each in ast.walk(b)}
        found = [
            Import(file, getattr(node, "lineno", 0), module)
            for node in ast.walk(tree)
            if node not in typing_only
            for module in _imported(node, file)
        ]
        assert [each for each in found if each.of(*PACKAGES)] == []


# What the modules of a feature may import of the packages, by their kind: see `ringmaster.features`. Others may import
# `techniques`.
OF_FEATURES = {
    "job": ("techniques",),
    "trainer": ("techniques",),
    "batch": ("techniques", "tasks"),
    "terms": ("techniques", "tasks"),
    "execute": ("techniques", "tasks"),
    "commands": PACKAGES,
    "batch_requests": PACKAGES,
    "forms": PACKAGES,
    "pages": ("techniques", "tasks", "model_lineage"),
    "routes": PACKAGES,
    "server": PACKAGES,
    "feed": PACKAGES,
    "sources": PACKAGES,
    "actions": PACKAGES,
    "curves": ("techniques", "tasks"),
    "sweep": ("techniques", "tasks"),
    **dict.fromkeys(("suite", "behaviour"), ("techniques", "tasks")),
    "drawing": ("techniques", "tasks"),
    "model_card": ("techniques", "model_lineage"),
    "importing": ("model_lineage",),
    **dict.fromkeys(("gains", "answers"), ("tasks",)),
    "engine_folders": ("techniques", "model_lineage"),
    "hub_folder": PACKAGES,
    "retraining": PACKAGES,
    "champion_value": PACKAGES,
    **dict.fromkeys(
        (
            "tariff_objectives",
            "tariff_values",
            "tariff_bound",
            "tariff_program",
            "tariff_arrays",
            "tariff_kernels",
            "tariff_search",
            "tariff_planner",
        ),
        ("tasks",),
    ),
    "waiting": ("tasks",),
    "pool_tariff": ("tasks",),
    **dict.fromkeys(("slurm_engine", "pbs_engine"), ("tasks",)),
    "pool_quotas": ("tasks",),
    "quota_worth": ("tasks",),
    "quota_flows": PACKAGES,
}
# Features, and folders of one, that have several modules of one kind.
OF_FOLDERS = {
    "daemon": PACKAGES,
    "diagnosis": PACKAGES,
    "undo": PACKAGES,
    "bisection": PACKAGES,
    "technique_report": PACKAGES,
    "reproduction": PACKAGES,
    "endpoint/server": PACKAGES,
    "endpoint/compute": ("techniques",),
    "ray": ("techniques", "tasks"),
}
OF_LIBRARIES = {"prefect": "flows", "optuna": "tasks", "mlflow": "model_lineage"}
"""The package that a module of a feature may import if it imports a library."""
FEATURES = f"src/{IMPORT_ROOT}/features"


def is_foreign_to_its_feature(found: Import) -> bool:
    """Whether a module of a feature imports another feature, or a package that its kind of module may not import."""
    feature, *_, name = found.file.with_suffix("").relative_to(FEATURES).parts
    is_own = found.of(f"features.{feature}")
    folder = str(found.file.parent.relative_to(FEATURES))
    allowed = OF_FOLDERS.get(folder) or OF_FEATURES.get(name, ("techniques",))
    is_light = name in ("job", "tariff_objectives")
    return (
        (found.of("features") and not is_own)
        or (found.of(*PACKAGES) and not found.of(*allowed))
        or (is_light and found.of("torch", "transformers", "pydantic"))
        or ("flows" in allowed and found.of("torch", "transformers"))
        or (found.of("ray") and feature != "ray")
        or any(found.of(library) and package not in allowed for library, package in OF_LIBRARIES.items())
        or found.of("pulp", "highspy")
    )


def names_a_feature(found: Import) -> bool:
    """Whether a module outside of features imports one of them, and not what finds them alone."""
    target = found.module.removeprefix(f"{IMPORT_ROOT}.").split(".")
    return target[0] == "features" and (ROOT / FEATURES / target[1] if target[1:] else ROOT / "none").is_dir()


def test_features_import_no_other_feature_and_what_their_kind_of_module_may():
    found = [each for each in imports(ROOT, (FEATURES,)) if each.file.parent.name != "features"]
    assert found and [f"{i.file}:{i.line} {i.module}" for i in found if is_foreign_to_its_feature(i)] == []


def test_no_module_of_the_packages_names_a_feature():
    assert [f"{i.file}:{i.line} {i.module}" for i in imports_here() if names_a_feature(i)] == []


def read_lists(table: str) -> set[tuple[str, str]]:
    """The kinds of modules and the lists in the table for authors of features; a row without a kind has that above."""
    result, kind = set(), ""
    for row in table.splitlines()[2:]:
        first, lists = row.split("|")[1:3]
        kind = first.strip().strip("`").removesuffix(".py") or kind
        result |= {(kind, name) for name in re.findall(r"`([A-Z]+(?:_[A-Z]+)*)`", lists)}
    return result


def test_each_page_for_engineers_names_the_modules_of_features_that_are_imported_and_their_lists():
    of_packages = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    texts = [file.read_text() for file in (*of_packages, *(ROOT / FEATURES).glob("*/*.py"))]
    kinds = set(re.findall(r"""\b(?:modules|listed)\("(\w+)\"""", "\n".join(texts)))
    assert len(kinds) > 5
    overview = (ROOT / FEATURES / "__init__.py").read_text()
    assert set(re.findall(r"^    (\w+)  +\w", overview.split('"""')[1], re.MULTILINE)) == kinds
    (row,) = [line for line in (ROOT / "docs" / "architecture.md").read_text().splitlines() if f"`{FEATURES}/`" in line]
    assert set(re.findall(r"`(\w+)\.py`", row)) == kinds
    guide = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add a feature")[2].partition("\n## ")[0]
    table = "\n".join(line for line in guide.splitlines() if line.startswith("|"))
    assert set(re.findall(r"^\| `(\w+)\.py`", table, re.MULTILINE)) == kinds
    names = set(re.findall(r"`([A-Z]+(?:_[A-Z]+)*)`", table))
    for name in names:
        assert any(re.search(rf"^{name}\b.* = ", text, re.MULTILINE) for text in texts), f"no feature lists {name}"
    assert {(kind, name) for kind, lists in HOOKS.items() for name in lists} == read_lists(table)
    read = r"""\b(?:listed\("\w+", |getattr\((?:module|source), )"([A-Z_]+)\""""
    assert set(re.findall(read, "\n".join(texts))) - names == set()


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("a/trainer.py", "from ringmaster.features.b.trainer import Part"),
        ("a/trainer.py", "def f():\n    from ringmaster.tasks.cluster import Device"),
        ("a/terms.py", "from ringmaster.flows import cli"),
        ("a/job.py", "import pydantic"),
        ("a/commands.py", "import torch"),
        ("a/execute.py", "import ray.util"),
        ("a/execute.py", "from prefect import flow"),
        ("a/terms.py", "import pulp"),
    ],
)
def test_a_feature_that_imports_too_much_is_found(file: str, source: str, tmp_path: Path):
    path = tmp_path / FEATURES / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    (told,) = imports(tmp_path, (FEATURES,))
    assert is_foreign_to_its_feature(told)


def test_a_package_that_names_a_feature_is_found(tmp_path: Path):
    (tmp_path / "tasks").mkdir()
    lines = ("from ringmaster import features", "from ringmaster.features import modules")
    (tmp_path / "tasks" / "a.py").write_text("\n".join((*lines, "import ringmaster.features.kernels.trainer")))
    assert [names_a_feature(each) for each in imports(tmp_path)] == [False, False, True]


def test_the_modules_of_private_names_import_their_library_alone():
    for found in imports(ROOT, (str(COMPAT),)):
        library = found.module.partition(".")[0]
        assert library in sys.stdlib_module_names or f"compat.{found.file.stem}" in compat_modules(library), found


def test_importing_the_package_of_private_names_imports_none_of_the_libraries():
    libraries = {"torch", "transformers", "accelerate", "mlflow", "prefect", "numba", "lm_eval"}
    assert not imported_by(f"{IMPORT_ROOT}.compat") & libraries


def without_root(found: Iterable[Import]) -> list[str]:
    """Imports of our packages from the top of the import path, which would load a module twice under two names."""
    return [f"{i.file}:{i.line} imports {i.module}" for i in found if i.module.partition(".")[0] in PACKAGES]


def test_every_part_of_tasks_has_its_layer():
    parts = {file.parts[1].removesuffix(".py") for file in modules(ROOT, ("tasks",))} - {"__init__"}
    assert parts == set(LAYER)


def test_our_packages_are_imported_from_the_import_root():
    others = tuple(folder for folder in FOLDERS if folder not in PACKAGES)
    assert not without_root((*imports_here(), *imports(ROOT, others)))


def test_an_import_from_the_top_is_found(tmp_path: Path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text("import os\nfrom tasks.batch import Batch\nfrom ringmaster import tasks\n")
    assert without_root(imports(tmp_path, FOLDERS)) == ["tests/a.py:2 imports tasks.batch.Batch"]


def imported_by(*names: str) -> set[str]:
    """The top-level modules in a fresh process after importing `names`."""
    program = f"import sys, {', '.join(names)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_them_does_not_import_torch():
    names = ("techniques.registry", "techniques.metrics.classification", "tasks.batch", "tasks.cluster")
    ours = [f"{IMPORT_ROOT}.{name}" for name in (*names, "features.bisection.bisecting")]
    assert not imported_by("techniques", *ours) & {"torch", "transformers"}


def test_commands_that_read_import_no_engine():
    names = ("commands.planning", "commands.lineage", "lineage.views", "reports.plan_report")
    found = imported_by(*(f"{IMPORT_ROOT}.flows.{name}" for name in names))
    assert not found & {"torch", "transformers", "prefect", "mlflow", "sqlalchemy"}


def test_planning_is_imported_without_torch_prefect_and_mlflow():
    files = [file for file in modules(ROOT) if file.is_relative_to("tasks/planning") and file.name != "task.py"]
    names = [".".join((IMPORT_ROOT, *file.with_suffix("").parts)).removesuffix(".__init__") for file in files]
    assert not imported_by(*names) & {"torch", "transformers", "prefect", "mlflow"}


def test_what_is_imported_is_named_among_the_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [lines for extra, lines in project["optional-dependencies"].items() if extra != "dev"]
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    named = {re.match(r"[\w-]+", line)[0].lower().replace("-", "_") for line in lines}
    # Distributions whose modules have other names; pydantic_core belongs to pydantic, which pins it.
    named |= {"PIL", "faiss", "google", "sklearn", "yaml", "pynvml", "pydantic_core", "pythonjsonlogger"}
    named |= {"accelerate", "sitecustomize"}  # the script's own and the machine's, where a script is adopted
    foreign = {i.module.partition(".")[0] for i in imports_here()} - sys.stdlib_module_names - {IMPORT_ROOT, ""}
    assert foreign - named == set()


def test_no_module_bears_a_name_of_the_standard_library():
    bad = [
        str(file)
        for file in modules(ROOT)
        if (file.parent.name if file.name == "__init__.py" else file.stem) in sys.stdlib_module_names
    ]
    assert not bad, f"{bad} bear names of the standard library: a script in the same folder would import them instead"


def _mutable_state(source: str) -> list[int]:
    """Returns the lines of a module with a `global` statement, a context variable, or a variable that starts empty."""
    tree = ast.parse(source)
    lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Global)]
    for node in tree.body:
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        is_empty = isinstance(value, (ast.List, ast.Dict)) and ast.unparse(value) in ("[]", "{}")
        is_context = isinstance(value, ast.Call) and ast.unparse(value.func).endswith("ContextVar")
        target = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0]) if value else ""
        is_none = isinstance(value, ast.Constant) and value.value is None and not target.isupper()
        if is_empty or is_context or is_none:
            lines.append(node.lineno)
    return lines


STATE = ("flows/services/server_answers.py",)  # how long this process waits, wherever it looks for a pool


def test_flows_and_stages_keep_no_state_on_modules():
    found = [
        f"{file}:{line}"
        for file in modules(ROOT, ("flows", "tasks"))
        if str(file) not in STATE
        for line in _mutable_state((ROOT / file).read_text())
    ]
    assert found == [], "pass an object, such as the `Caller` of a flow"


@pytest.mark.parametrize(
    "source",
    [
        "_runs: dict[str, int] = {}",
        "_views = []",
        "_server: Server | None = None",
        "view: ContextVar[View] = ContextVar('view')",
        "def start():\n    global server\n    server = 1",
    ],
)
def test_state_on_a_module_is_found(source: str):
    assert len(_mutable_state(source)) == 1


def test_no_file_is_called_utils():
    bad = [str(file) for file in modules(ROOT, FOLDERS) if file.name == "utils.py"]
    assert not bad, f"{bad}: name a module after what it holds"


def test_no_import_cycle():
    """Imports inside functions and for type checking count too."""
    names = {".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in modules(ROOT)}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for found in imports_here():
        name = ".".join(found.file.with_suffix("").parts).removesuffix(".__init__")
        target = found.module.removeprefix(f"{IMPORT_ROOT}.")
        while target and target not in names:
            target = target.rpartition(".")[0]
        if target and target != name:
            graph[name].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


# Private words of earlier versions, and limits that are not called MAX_ or MIN_. Stored names (keys, tables, options)
# are texts, not identifiers.
FORMER_NAMES = re.compile(
    "(?i)(steward|(?<!servic)estate|succession|haunt|ghost|roster|enlist|forethought|introspect|workshop|workplace|historian|"
    "chronicle|conductor|(?<!de)(?<!sub)scribe|whereabouts|rehears|fellow|tending|portions|(?-i:^_?(?:MOST|LEAST)_|[a-z]Parts?$))"
)


# What says that something was said, found or asked, and not what it is.
VAGUE_NAMES = frozenset(
    ("told", "said", "untold", "mine", "found", "asked", "asks", "beside", "judged", "surroundings", "fellows")
)


def vague_names(source: str) -> list[str]:
    """Returns `line: name` of what is defined or assigned in a source under a name that does not say what it holds."""
    names = [
        (node.lineno, name)
        for node in ast.walk(ast.parse(source))
        for name in (
            [node.id]
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            else [node.attr]
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            else [node.arg]
            if isinstance(node, ast.arg)
            else [node.name]
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            else []
        )
    ]
    return [f"{line}: {name}" for line, name in names if name.lstrip("_") in VAGUE_NAMES]


def test_names_say_what_they_hold():
    files = modules(ROOT, (*PACKAGES, f"src/{IMPORT_ROOT}"))
    assert [f"{file}:{each}" for file in files for each in vague_names((ROOT / file).read_text())] == []


def test_a_vague_name_is_found():
    source = "def f(mine):\n    self._told = found = 1\n    for asked in mine: self.judged()"
    assert vague_names(source) == ["1: mine", "2: _told", "2: found", "3: asked"]


def test_no_identifier_is_a_former_name():
    texts = {file: (ROOT / file).read_text() for file in modules(ROOT, (*PACKAGES, "benchmarks"))}
    found = [
        f"{file}:{token.start[0]}: {token.string}"
        for file, text in texts.items()
        if FORMER_NAMES.search(text)  # tokens take long
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.NAME and FORMER_NAMES.search(token.string)
    ]
    assert found == []
