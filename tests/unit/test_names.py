"""Names are checked where they enter, as they become folders, addresses, and keys of MLflow."""

from pathlib import Path

import pytest

from ringmaster.errors import BatchFileError, InputError, ProblemError
from ringmaster.features.foreign_models.commands import import_
from ringmaster.flows.batch.batch_input import as_batch
from ringmaster.flows.commands.pool import submit
from ringmaster.flows.pool.own_node import node_name
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.datasets.catalogue import catalogue_of
from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem
from ringmaster.techniques import DataSpec, Job, ModelSpec
from ringmaster.techniques.job_features import is_name
from ringmaster.text import MAX_IN_NAME, is_printable_name

NO_NAMES = (
    "",
    ".",
    "../up",
    "a/b",
    "a b",
    "a\n",
    "a\x1b[2J",
    "a\0",
    "\ud800",
    "\u202ea",
    "-a",
    "a" * 101,
    "[bold]",
    "ä",
    3,
    None,
)
NOT_PRINTABLE = (
    "",
    " a",
    "a\n",
    "a\tb",
    "a\x1b[2J",
    "a\0",
    "\ud800",
    "\u202ea",
    "a\u2028b",
    "a" * (MAX_IN_NAME + 1),
    3,
    None,
)


def job(name) -> Job:
    return Job(name=name, model=ModelSpec(factory="a:b"), data=DataSpec(source="digits"), num_steps=1)


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_batch_that_comes_as_json_has_names(name):
    assert not is_name(name)
    emit_alarm = Batch(name="b", jobs=(job("a"), job("b.2-c_d")), folder=Path(), text="").to_json()
    assert as_batch(emit_alarm).jobs[1].name == "b.2-c_d"
    wrong = {**emit_alarm, "name": name, "jobs": [emit_alarm["jobs"][0], {**emit_alarm["jobs"][1], "name": name}]}
    with pytest.raises(BatchFileError) as error:
        as_batch(wrong)
    assert [fault.place for fault in error.value.faults] == ["name", "jobs[1].name"]
    assert str(error.value).replace("\n", "").isprintable()


@pytest.mark.parametrize("name", [name for name in NO_NAMES if name])
def test_a_node_and_a_submitted_batch_have_names(name, monkeypatch):
    if not isinstance(name, str):
        return
    with pytest.raises(InputError, match="cannot be called"):
        node_name(name)
    monkeypatch.setattr("ringmaster.flows.pool.batch_requests.pool_address", lambda: None)
    with pytest.raises(InputError, match="is not a valid name"):
        submit(None, jobs_file=Path("b.yaml"), batch=name)  # the context is not used before


@pytest.mark.parametrize("name", NOT_PRINTABLE)
def test_ids_of_a_problem_can_be_shown(name):
    assert not is_printable_name(name)
    option = Option("ddp", 1, 1.0)
    for kinds in ((name, "n", "a"), ("p", name, "a"), ("p", "n", name)):
        with pytest.raises(ProblemError) as error:
            Problem(kinds[0], (PlanningNode(kinds[1], 1),), (PlanningJob(kinds[2], (option,)),))
        assert "must be text of at most 250 visible characters" in str(error.value)


def test_ids_of_a_problem_may_have_any_visible_characters():
    Problem("a b, [c]", (PlanningNode("ñ/0", 1),), (PlanningJob("[bold] x", (Option("ddp", 1, 1.0),)),))


@pytest.mark.parametrize("name", [name for name in NOT_PRINTABLE if isinstance(name, str)])
def test_data_sets_and_their_versions_can_be_shown(name, tmp_path):
    for raw in ({name: {"path": "a.txt"}}, {"a": {"versions": {name: {"path": "a.txt"}}}}):
        catalogue, found = catalogue_of(raw, folder=tmp_path)
        assert not catalogue.entries
        assert "has the name" in found[0].message


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\0", "\ud800", "a/b", "a'b", "", "a\n"])
def test_an_imported_model_has_a_name(name):
    with pytest.raises(InputError, match="cannot be called"):
        import_("org/model", name=name)
