"""Private names of the LM Evaluation Harness."""

from pathlib import Path
from typing import Any


def task_config(file: Path) -> dict[str, Any]:
    """Returns the config in a task's YAML file, with what it includes and with the functions that it names.

    Public names read whole folders of tasks, of which one fault stops all. Without it a task's paths to data files,
    which are relative to its file, cannot be made absolute before it is loaded.
    """
    from lm_eval.tasks._yaml_loader import load_yaml

    config: dict[str, Any] = load_yaml(file)
    return config
