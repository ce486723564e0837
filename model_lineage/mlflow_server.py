"""MLflow's server in one process: `python -m ringmaster.model_lineage.mlflow_server OPTIONS`, those of `mlflow server`.

`mlflow server` prepares the databases and the users, and then starts uvicorn as a child process, which imports all of
MLflow once more. Its own process only waits for the child from then on, with 215 MB. Here it serves itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import mlflow.server
import uvicorn
from mlflow.cli import cli


def main(arguments: Sequence[str]) -> None:
    """Serves until SIGTERM."""
    # The only function of MLflow by which `mlflow server` starts its child process.
    assert hasattr(mlflow.server, "_exec_cmd"), "this MLflow starts its server in another way"
    mlflow.server._exec_cmd = _serve
    cli(["server", *arguments])


def _serve(command: Sequence[str], *, extra_env: Mapping[str, str], **_: Any) -> NoReturn:
    """Runs `python -m uvicorn ...` in this process."""
    module = command.index("uvicorn")
    assert list(command[:module]) == [sys.executable, "-m"], command
    os.environ.update(extra_env)
    uvicorn.main(list(command[module + 1 :]))
    raise AssertionError("uvicorn's command line does not return")


if __name__ == "__main__":
    main(sys.argv[1:])
