"""The command `ringmaster monitor`: assertions on logged predictions."""

import json
import sys

import pytest
from typer.testing import CliRunner

from ringmaster.errors import BatchFileError, InputError
from ringmaster.flows.cli import app

ASSERTIONS = """\
name: prices
assertions:
  - {name: sane, finite: [price]}
  - {name: plausible, range: {field: price, min: 0, max: 100}, max_failures: 0.25}
  - {name: own, predicate: "own_monitor_rules:whole"}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "own_monitor_rules", raising=False)  # of another test's folder
    (tmp_path / "own_monitor_rules.py").write_text("def whole(row): return row['price'] == int(row['price'])\n")
    (tmp_path / "assertions.yaml").write_text(ASSERTIONS)
    return tmp_path


def run(folder, *prices, text=None):
    log = "".join(json.dumps({"price": price}) + "\n" for price in prices) if text is None else text
    (folder / "log.jsonl").write_text(log)
    return CliRunner().invoke(
        app, ["monitor", str(folder / "assertions.yaml"), str(folder / "log.jsonl"), "--json"], catch_exceptions=True
    )


def test_a_log_that_holds_ends_with_0(folder):
    done = run(folder, 1, 2, 300, 4)
    assert done.exit_code == 0
    said = json.loads(done.stdout)
    assert (said["passed"], said["num_rows"]) == (True, 4)
    assert [a["num_failures"] for a in said["assertions"]] == [0, 1, 0]


def test_one_assertion_that_fails_ends_with_1_and_says_where(folder):
    done = run(folder, 1, 2.5, 300, 400)
    assert done.exit_code == 1
    sane, plausible, own = json.loads(done.stdout)["assertions"]
    assert (sane["passed"], plausible["passed"], own["passed"]) == (True, False, False)
    assert own["examples"] == ["row 2: own_monitor_rules:whole returns false"]


def test_what_cannot_be_read_is_told(folder):
    assert isinstance(run(folder, text="{").exception, InputError)
    (folder / "assertions.yaml").write_text("name: x\nslices: [{name: a, column: b}]\n")
    assert "has no assertions" in str(run(folder, 1).exception)
    (folder / "assertions.yaml").write_text("name: x\nassertions: [{name: a}]\n")
    assert isinstance(run(folder, 1).exception, BatchFileError)
