"""The feature in `examples/plugin`, installed as a distribution, has its key, its rules, and its part in training."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from pathlib import Path
import pytest
from ringmaster.codec import from_json, set_fields, to_json
from ringmaster.errors import BatchFileError
from ringmaster.tasks.batch import json_schema, load_batch, parse_batch
from ringmaster.techniques import Job, registry
from ringmaster.techniques.training.parts import part_classes

file = Path(sys.argv[1])
(job,) = load_batch(file).jobs
(part,) = job.parts
stored = to_json(job)
assert stored["centralize_gradients"] is True and from_json(Job, stored) == job
assert set_fields(job)["centralize_gradients"] is True  # counts for profiles, as any other field
assert "centralize_gradients" in json_schema()["$defs"]["JobEntry"]["properties"]
assert part.why_not(registry.load(registry.BUILTIN["single"])) is None
assert "whole matrices" in part.why_not(registry.load(registry.BUILTIN["zero2"]))
assert [each.__name__ for each in part_classes()][-1] == "CentralizationPart"
with pytest.raises(BatchFileError, match=r"centralize_gradients: must be true or false"):
    parse_batch(file.read_text().replace("gradients: true", "gradients: 3"), folder=file.parent, name="batch.yaml")
"""


def test_an_installed_feature_is_part_of_jobs_files_and_training(tmp_path):
    plugin, folder = ROOT / "examples" / "plugin", tmp_path / "installed"
    # Its build writes into the folder of its sources.
    source = tmp_path / "plugin"
    source.mkdir()
    for path in plugin.rglob("*"):
        if path.suffix in (".py", ".toml", ".yaml"):
            (source / path.relative_to(plugin)).parent.mkdir(parents=True, exist_ok=True)
            (source / path.relative_to(plugin)).write_bytes(path.read_bytes())
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", str(folder), str(source)], check=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    program = [sys.executable, "-c", PROGRAM, str(source / "batch.yaml")]
    subprocess.run(program, check=True, env=environment, cwd=tmp_path)
