"""A flow and its function have one name, so that who sees a run in Prefect finds the code that it runs."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]


def names_of_flows():
    """The name in Prefect and the function of each flow, by the function's place."""
    for file in sorted((ROOT / "flows").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for decorator in getattr(node, "decorator_list", ()):
                if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "flow":
                    name = next(each.value.value for each in decorator.keywords if each.arg == "name")
                    yield f"{file.relative_to(ROOT)}: {node.name}", name, node.name


def test_names_of_flows_are_those_of_their_functions():
    flows = list(names_of_flows())
    assert {"train-batch", "sweep", "retrain-daily", "serve-node"} <= {name for _, name, _ in flows}
    assert [(place, name) for place, name, function in flows if name != function.replace("_", "-")] == []
