"""`ringmaster lineage bisect`: finds which adaptation of a family broke a model."""

import pytest

from ringmaster.model_lineage import Ledger
from ringmaster.model_lineage.model_pages import family_path
from tests.integration.lineage.family import answer, run

pytestmark = pytest.mark.usefixtures("family_home")


def test_bisect_by_a_command_names_the_adaptation(tmp_path):
    (tmp_path / "check.sh").write_text('! grep -q "true" "$1/config.json"\n')
    said = answer("bisect", "small", "--test", f"sh {tmp_path}/check.sh")
    (culprit,) = said["culprits"]
    assert (culprit["child"], culprit["parents"], culprit["kind"]) == ("spoilt/1", ["base/1"], "fine-tuned")
    assert culprit["datasets"][0]["name"] == "spam"
    assert said["is_monotone"] and said["verdicts"]["small/1"] is False
    code, output, _ = run("bisect", "merged", "--test", f"sh {tmp_path}/check.sh", "--all")
    assert code == 0
    assert "spoilt/1 is where it broke: fine-tuned from base/1, on spam" in output


def test_bisect_by_a_recorded_metric_needs_no_files():
    said = answer("bisect", "small", "--test", "loss <= 2.0")
    assert [culprit["child"] for culprit in said["culprits"]] == ["spoilt/1"]


def test_pages_mark_the_culprit_what_it_reached_and_who_serves(family_home):
    ledger = Ledger(f"sqlite:///{family_home}/mlflow.db", artifact_root=family_home / "mlartifacts")
    before = picture_of(ledger, "base")
    assert run("bisect", "small", "--test", "loss <= 2.0", "--no-record")[0] == 0
    assert picture_of(ledger, "base") == before
    assert run("bisect", "small", "--test", "loss <= 2.0")[0] == 0
    marked = picture_of(ledger, "tuned")
    assert (marked.count(">culprit<"), marked.count(">reached<"), marked.count(">champion<")) == (1, 3, 1)
    assert ">culprit<" in picture_of(ledger, "base") and "merged v1" in picture_of(ledger, "small")
    page = ledger.client.get_model_version("spoilt", "1").description
    assert page.startswith("**A fault began here**, as a bisection found by the test `loss <= 2.0`.\n\n- fine-tuned")
    assert run("bisect", "small", "--test", "loss <= 2.0")[0] == 0
    assert ledger.client.get_model_version("spoilt", "1").description == page
    drawn = family_home / "family.svg"
    assert run("export", "small", "--format", "svg", "-o", drawn)[0] == 0
    assert (drawn.read_text().count(">culprit<"), drawn.read_text().count(">reached<")) == (1, 2)


def picture_of(ledger, name):
    """The picture on a model's page."""
    record = ledger.get_version(name, 1)
    return ledger.read_text(record.run_id, family_path(record))


@pytest.mark.parametrize("status", [126, 137])
def test_a_test_that_says_nothing_of_the_model_is_no_verdict(status):
    code, _, said = run("bisect", "small", "--test", f"exit {status};")
    assert code == 2
    assert f"ended with {status}" in said


def test_a_model_that_the_test_passes_over_is_named_where_it_may_be_the_culprit(tmp_path, family_home):
    spoilt = answer("show", "spoilt")["model"]["id"]
    skips = f'case "$1" in *{spoilt}*) exit 125;; esac'
    (tmp_path / "check.sh").write_text(f'{skips}\n! grep -q "true" "$1/config.json"\n')
    command = f"sh {tmp_path}/check.sh"
    said = answer("bisect", "small", "--test", command)
    (culprit,) = said["culprits"]
    assert (culprit["child"], culprit["parents"], culprit["perhaps"]) == ("tuned/1", ["base/1"], ["spoilt/1"])
    assert said["untested"] == ["spoilt/1"]
    assert (
        "or it was one of those before it that cannot be tested: spoilt/1"
        in run("bisect", "small", "--test", command)[1]
    )
    assert "cannot be tested" in run("bisect", "spoilt", "--test", command)[2]


def test_a_bisect_that_was_interrupted_goes_on_with_what_it_knows(tmp_path, family_home):
    """The test command is killed at its third model; the repeated command then tests the remaining models only."""
    (tmp_path / "check.sh").write_text(
        'echo "$1" >> asked\n[ -e broken ] && [ $(wc -l < asked) = 3 ] && exit 137\n! grep -q "true" "$1/config.json"\n'
    )
    (tmp_path / "broken").touch()
    command = f"cd {tmp_path}; sh ./check.sh"
    code, _, said = run("bisect", "small", "--test", command, "--all")
    assert code == 2 and "continues from here" in said
    (tmp_path / "broken").unlink()
    code, output, said = run("bisect", "small", "--test", command, "--all")
    assert code == 0 and "continuing with 2 verdicts" in said and "spoilt/1 is where it broke" in output
    asked = (tmp_path / "asked").read_text().split()
    assert len(asked) == 5 and asked[2] == asked[3] and len(set(asked)) == 4
    assert not list((family_home / "cache" / "bisect").iterdir())
    run("bisect", "small", "--test", command, "--all")  # the bisection has ended: another one starts anew
    assert len((tmp_path / "asked").read_text().split()) == 9
