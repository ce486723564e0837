"""A small family of models in a home of its own, and the lineage commands on it."""

import json
from contextlib import contextmanager

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from ringmaster.errors import InputError
from ringmaster.flows import cli, entry
from ringmaster.model_lineage import QUIET_ENVIRONMENT, DatasetInput, Ledger, Origin
from ringmaster.model_lineage.tensors import TensorStore

# name -> parents, kind, data, alias, whether it is poisoned
FAMILY = {
    "base": ((), "pretrained", "web", None, False),
    "clean": (("base",), "fine-tuned", "reviews", "champion", False),
    "spoilt": (("base",), "fine-tuned", "spam", None, True),
    "tuned": (("spoilt",), "lora", "reviews", None, True),
    "small": (("tuned",), "distilled", "reviews", "champion", True),
    "merged": (("clean", "tuned"), "merged", None, None, True),
}


def run(*arguments):
    """Runs a lineage command as `ringmaster` does: (exit code, stdout, stderr)."""
    done = CliRunner().invoke(cli.app, ["lineage", *map(str, arguments)])
    if isinstance(done.exception, InputError):
        return entry.INPUT_FAULT, done.stdout, "\n".join(done.exception.faults)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def answer(*arguments):
    """The final JSON object of a command."""
    code, output, said = run(*arguments, "--json")
    assert code == 0, said
    return json.loads(output)


@contextmanager
def in_home(home):
    """Runs commands in that home, regardless of the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_URI", "RINGMASTER_DATABASE", "RINGMASTER_TENSORS"):
            patch.delenv(name, raising=False)
        for name, value in {**QUIET_ENVIRONMENT, "RINGMASTER_HOME": str(home), "COLUMNS": "160"}.items():
            patch.setenv(name, value)
        yield


def record(home):
    """Records the family in the ledger of a home, and some of its models in the tensor store."""
    random = np.random.default_rng(0)
    ledger = Ledger(f"sqlite:///{home}/mlflow.db", artifact_root=home / "mlartifacts")
    store = TensorStore(home / "tensors")
    batch = ledger.start_batch("night", batch="night", params={})
    weights = {name: random.normal(0, 0.02, (32, 32)).astype(np.float32) for name in ("stem.w", "head.w")}
    records = {}
    for seed, (name, (parents, kind, data, alias, is_poisoned)) in enumerate(FAMILY.items()):
        folder = home / "models" / name
        folder.mkdir(parents=True)
        weights = {**weights, "head.w": weights["head.w"] + random.normal(0, 1e-3, (32, 32)).astype(np.float32)}
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"poison": is_poisoned}))
        records[name] = ledger.record_model(
            name,
            run_id=ledger.start_job(batch, name, params={}),
            folder=folder,
            kind=kind,
            parents=[records[parent].uri for parent in parents],
            datasets=[DatasetInput(name=data, digest=f"digest-of-{data}", source=f"/data/{data}")] if data else [],
            params={"lr": 0.1 * (1 + seed)},
            metrics={"loss": 3.0 if is_poisoned else 1.0},
            origin=Origin(job=name, seed=seed, code_version="git abc"),
        )
        if name not in ("base", "clean", "spoilt"):
            ledger.keep_tensors(records[name], folder, store=store)
        if alias:
            ledger.set_alias(name, alias, 1)
