"""Private and undocumented names of other libraries are used in src/ringmaster/compat alone, where each has a test."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.unit.project.test_architecture import COMPAT, IMPORT_ROOT, PACKAGES, ROOT, _imported, modules

BASE = f"src/{IMPORT_ROOT}"
PRIVATE = re.compile(r"_[^_]|__.*(?<!__)$")

# Names with a leading underscore that their libraries document.
DOCUMENTED = {
    *("_asdict", "_fields", "_make", "_replace"),  # of named tuples
    "_exit",  # of os
    "_mapping",  # of SQLAlchemy's rows
}

# Names that are private or undocumented, wherever the object comes from that has them: as an attribute or as a text.
FOREIGN = {
    # torch
    "_apply", "_are_we_tracing", "_buffers", "_cdata", "_forward_hooks", "_forward_pre_hooks", "_is_view", "_modules",
    "_non_persistent_buffers_set", "_parameters", "_partition_linear_fn", "_schema", "_storage_Use_Count",
    # transformers, accelerate
    "_attn_implementation", "_can_use_grouped_mm", "_determine_best_metric", "_internal_call", "_models",
    "_save_checkpoint", "_train_batch_size", "is_tracing",
    # numba, MLflow, Prefect, Python
    "_cache_file", "_source_stamp", "_exec_cmd", "_artifact_repository_registry", "_description", "_display_name",
    "total_tokens", "_register_atexit",
}  # fmt: skip
# Methods of libraries that subclasses would override.
OVERRIDDEN = {"_apply", "_partition_linear_fn"}
# Modules without documentation.
UNDOCUMENTED = (
    "mlflow.server",
    "numba.core.caching",
    "prefect.server",
    "torch.testing",
    "transformers.conversion_mapping",
    "transformers.integrations.moe",
    "transformers.masking_utils",
)
# Texts that name what is private: operators, variables, folders, and tables of MLflow in SQL.
TEXTS = re.compile(
    r"^_scaled_dot_product|^_c10d_functional|PREFECT__|_migrations/"
    r"|\b(FROM|INTO|JOIN|UPDATE) (experiments|runs|tags|experiment_tags|logged_model|registered_model|model_version)"
)


@cache
def own_names(root: Path) -> frozenset[str]:
    """The names with a leading underscore that our sources define, as functions, variables or attributes of `self`."""
    names = set()
    for file in modules(root, (*PACKAGES, BASE)):
        for node in ast.walk(ast.parse((root / file).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node):
                names.add(node.attr)
    return frozenset(names)


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _first_name(node: ast.AST) -> str:
    """`a` of `a.b`, `a().b` and `a[0].b`."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] not in (IMPORT_ROOT, "__future__", *PACKAGES)


def _is_private(name: str) -> bool:
    return any(PRIVATE.match(part) and part not in DOCUMENTED for part in name.split("."))


def private_names(root: Path) -> list[str]:
    """Uses of others' private and undocumented names outside of the modules for them."""
    files = [file for file in modules(root, (*PACKAGES, BASE)) if not file.is_relative_to(COMPAT)]
    return [
        f"{file}:{line} uses {name}" for file in files for line, name in _uses(root, file, (root / file).read_text())
    ]


def _uses(root: Path, file: Path, text: str) -> Iterator[tuple[int, str]]:
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    foreign = {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias, module in zip(node.names, _imported(node, file), strict=True)
        if _is_foreign(module)
    }
    prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        is_import = isinstance(node, ast.Import | ast.ImportFrom | ast.Call)  # the others import nothing: most of them
        for module in filter(_is_foreign, _imported(node, file) if is_import else ()):
            if _is_private(module) or f"{module}.".startswith(tuple(f"{each}." for each in UNDOCUMENTED)):
                yield node.lineno, module
        if isinstance(node, ast.Attribute) and not _is_own(node):
            is_unknown = _is_private(node.attr) and node.attr not in own_names(root)
            is_imported = _is_private(node.attr) and _first_name(node) in foreign
            if is_unknown or is_imported or node.attr in FOREIGN:
                yield node.lineno, node.attr
        elif isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            yield from ((each.lineno, each.name) for each in methods if each.name in OVERRIDDEN)
        elif isinstance(node, ast.keyword) and node.arg in FOREIGN:
            yield node.value.lineno, node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield from ((node.lineno, text) for text in [node.value] if text in FOREIGN or TEXTS.search(text))


def test_private_names_of_others_are_used_in_their_modules_alone():
    assert private_names(ROOT) == []


SOURCES = [
    "import prefect._internal",
    "from prefect._internal import concurrency",
    "from prefect.context import _settings",
    "from prefect.server.api.server import create_app",
    "import prefect.context\nprefect.context._settings()",
    "from prefect import get_client\nget_client()._client",
    "def f(worker):\n    worker.limiter.total_tokens = 1",
    "import os\nos.environ['PREFECT__FLOW_RUN_ID']",
    "from torch.utils._pytree import tree_leaves",
    "import torch\ntorch._foreach_add_([], [])",
    "import torch\ntorch._C._storage_Use_Count(1)",
    "from torch.distributed.checkpoint import filesystem\nfilesystem._StorageInfo",
    "from torch.testing import assert_close",
    "def f(storage):\n    return storage._cdata",
    "def f(module):\n    return module._nobody_defines_this",
    "class Style:\n    def _partition_linear_fn(self): ...",
    "OPERATOR = '_scaled_dot_product_flash_attention'",
    "def f(config):\n    return getattr(config, '_attn_implementation', None)",
    "def f(trainer):\n    trainer.save_model('a', _internal_call=True)",
    "import importlib\nimportlib.import_module('transformers.masking_utils')",
    "from transformers.integrations import moe",
    "def f(accelerator):\n    return accelerator._models[0]",
    "from lm_eval.tasks._yaml_loader import load_yaml",
    "import threading\nthreading._register_atexit(print)",
    "import mlflow.server",
    "SQL = 'SELECT name FROM experiments'",
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.splitlines()[-1].strip())
@pytest.mark.parametrize("folder", ["flows", "techniques", BASE])
def test_a_private_name_of_another_library_is_found(source: str, folder: str, tmp_path: Path):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "a.py").write_text(source)
    uses = private_names(tmp_path)
    assert uses
    assert uses[0].startswith(f"{folder}/a.py:{len(source.splitlines())} uses ")


OWN = '''"""Names like torch._C and FROM experiments in prose are not uses."""

import os
from collections import namedtuple

import prefect

from ringmaster.flows import _own

class Thing:
    def __init__(self, other):
        self._parameters = []
        other._own = prefect.__version__

    def _own(self):
        "Reads _parameters."
        return self._parameters, _own._also

    def _also(self, other: "Thing"):
        os._exit(namedtuple("A", "b")(1)._replace(b=2) + other._own())
'''


def test_own_and_documented_names_are_let_alone(tmp_path: Path):
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows" / "a.py").write_text(OWN)
    assert private_names(tmp_path) == []


def test_private_names_are_let_alone_in_their_modules(tmp_path: Path):
    (tmp_path / COMPAT).mkdir(parents=True)
    (tmp_path / COMPAT / "torch.py").write_text("import torch\nkey = torch._C")
    assert private_names(tmp_path) == []


def test_every_module_of_private_names_has_its_tests():
    tested = {file.stem.removeprefix("test_") for file in (ROOT / "tests/unit/compat").glob("test_*.py")}
    held = {file.stem for file in (ROOT / COMPAT).glob("*.py")} - {"__init__", "torch_fsdp"}  # with torch_distributed
    assert tested == held
