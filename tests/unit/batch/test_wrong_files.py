"""Invalid batch files. Each starts with its expected messages: `{folder}` is its folder, and "..." ends a prefix."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ringmaster import extras
from ringmaster.errors import BatchFileError
from ringmaster.flows.sweep_form import load_sweep
from ringmaster.tasks.batch import load_batch
from ringmaster.tasks.evaluation.suite import load_suite
from ringmaster.tasks.retraining.policy import load_policy
from ringmaster.tasks.retraining.production import load_production

WRONG = sorted((Path(__file__).parent / "wrong").glob("*.yaml"))


def test_there_are_at_least_twelve_of_them():
    assert len(WRONG) >= 12


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_every_fault_is_told_at_once(path: Path):
    lines = path.read_text().splitlines()
    expected = [
        line.replace("# :", f"{path.name}:", 1).replace("{folder}", str(path.parent))
        for line in lines
        if line.startswith("# :")
    ]
    with pytest.raises(BatchFileError) as caught:
        load_batch(path)
    told = [str(fault) for fault in caught.value.faults]
    for i, message in enumerate(expected[: len(told)]):
        if message.endswith("..."):
            told[i] = told[i][: len(message) - 3] + "..."
    assert told == expected


def test_no_module_of_the_user_is_imported():
    with pytest.raises(BatchFileError):
        load_batch(Path(__file__).parent / "wrong" / "factories.yaml")
    assert "good_module" not in sys.modules


def test_a_module_with_a_syntax_error_is_named_with_its_line(tmp_path: Path):
    (tmp_path / "torn_module.py").write_text("x = 1\ndef load(:\n")
    (tmp_path / "batch.yaml").write_text(
        "jobs: [{name: a, model: {factory: 'torn_module:build'}, data: {source: digits}, num_steps: 1}]"
    )
    with pytest.raises(BatchFileError, match=r"torn_module\.py:2 is not Python"):
        load_batch(tmp_path / "batch.yaml")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "cannot be read: No such file or directory"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        (lambda path: path.write_bytes(b"name: \xff\xfe"), "is not UTF-8 text"),
        (lambda path: path.write_bytes(b"name: \x00"), "is not YAML"),
        (lambda path: path.write_text("[" * 5000), "is nested deeper than 50 levels"),
        (lambda path: path.write_text("a: " + "[" * 60 + "]" * 60), r"yaml:1: is nested deeper than 50 levels"),
    ],
    ids=["absent", "folder", "not-utf8", "control-character", "bottomless", "deep"],
)
def test_a_file_that_cannot_be_read(make, message: str, tmp_path: Path):
    path = tmp_path / "batch.yaml"
    make(path)
    with pytest.raises(BatchFileError, match=message):
        load_batch(path)


def test_a_base_in_4_bits_needs_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(extras.PACKAGES, "quantization", ("no_such_package",))
    file = tmp_path / "batch.yaml"
    file.write_text(
        "jobs: [{name: a, model: {from_pretrained: org/model}, adapter: {}, quantize_base: nf4, num_steps: 1,"
        " data: {source: python-stdlib, seq_len: 8}}]"
    )
    with pytest.raises(BatchFileError, match=r"needs no_such_package, not installed\. To fix: pip install"):
        load_batch(file)


EXAMPLES = Path(__file__).parents[3] / "examples"
KINDS = {
    "tiny_batch.yaml": "is a batch file, not",
    "sweep.yaml": "is a file of a sweep, not",
    "retraining.yaml": "is a file of models to retrain, not",
    "policy.yaml": "is a policy, not",
    "tests.yaml": "is a file of tests, not",
    "llama-7b.yaml": "is a job alone, not",
    "ludwig/ludwig.yaml": "is a Ludwig configuration, not",
}


@pytest.mark.parametrize("load", [load_batch, load_sweep, load_production, load_policy, load_suite])
def test_a_file_for_another_command_has_that_as_its_only_fault(load: Callable[[Path], object]):
    taken = []
    for name, message in KINDS.items():
        try:
            load(EXAMPLES / name)
            taken.append(name)
        except BatchFileError as error:
            (fault,) = error.faults
            assert message in str(fault)
    assert len(taken) == 1
