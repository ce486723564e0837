"""`ringmaster promote`: a person's decision, a policy's decision, and the resulting aliases in the registry."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from ringmaster.errors import InputError, LedgerError
from ringmaster.flows import cli, entry
from ringmaster.flows.commands import models, running
from ringmaster.flows.retraining import examine, shrinking
from ringmaster.model_lineage import QUIET_ENVIRONMENT, Ledger
from ringmaster.model_lineage.model_pages import family_path
from ringmaster.tasks.evaluation.examination import ExaminationResult, SliceMetric
from ringmaster.tasks.evaluation.suite_tests import TestResult
from ringmaster.tasks.retraining import promotion
from tests.integration.evaluation.test_scores import IMAGES, exported

NAME = "shop.digits"
POLICY = "name: careful\nsignificance: null\nsuites: [tests.yaml]\n"
TESTS = "name: digits\ntests: [{name: light, kind: invariance, held_out: 20, change: {brightness: 0.0}}]\n"
RIGHT = "name: digits\ntests: [{name: right, kind: minimum, held_out: 20}]\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home with three versions of an untrained model."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_URI", "RINGMASTER_DATABASE", "RINGMASTER_TENSORS"):
            patch.delenv(name, raising=False)
        for name, value in {**QUIET_ENVIRONMENT, "RINGMASTER_HOME": str(home), "OMP_NUM_THREADS": "1"}.items():
            patch.setenv(name, value)
        ledger = Ledger(f"sqlite:///{home}/mlflow.db", artifact_root=home / "mlartifacts")
        batch = ledger.start_batch("nights", params={})
        for number in (1, 2, 3):
            folder = exported(home / f"m{number}", IMAGES, cache_dir=home / "cache", seed=number)
            run = ledger.start_job(batch, f"digits{number}", params={})
            ledger.record_model(NAME, run_id=run, folder=folder, kind="pretrained")
        yield home


@pytest.fixture
def ledger(home):
    """The registry, with all aliases removed."""
    ledger = Ledger(f"sqlite:///{home}/mlflow.db", artifact_root=home / "mlartifacts")
    for alias in ("champion", "previous", "challenger"):
        if ledger.get_alias(NAME, alias) is not None:
            ledger.client.delete_registered_model_alias(NAME, alias)
    return ledger


def promote(*arguments):
    """Returns (exit code, the final JSON object or the error message)."""
    done = CliRunner().invoke(cli.app, ["promote", *map(str, arguments), "--json"])
    if isinstance(done.exception, InputError):
        return entry.INPUT_FAULT, "\n".join(done.exception.faults)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, json.loads(done.stdout)


def aliases(ledger):
    found = {alias: ledger.get_alias(NAME, alias) for alias in ("champion", "previous", "challenger")}
    return {alias: record.version for alias, record in found.items() if record is not None}


def last(ledger, version):
    return promotion.read_decisions(ledger, ledger.resolve_model(f"models:/{NAME}/{version}"))[-1]


def test_a_persons_word_is_kept_with_the_reason(ledger):
    assert promote(f"{NAME}/1", "--why", "the first one")[0] == 0
    code, said = promote(NAME, "--why", "faster")  # a bare name means its newest version
    assert code == 0
    assert said == {
        "model": NAME, "version": 3, "promoted": True, "champion": 3, "champion_before": 1, "reasons": ["faster"],
        "compared": None,
    }  # fmt: skip
    assert aliases(ledger) == {"champion": 3, "previous": 1, "challenger": 3}
    kept = last(ledger, 3)
    assert (kept.outcome, kept.reasons, kept.champion_before) == ("promoted", ("faster",), 1)
    assert kept.who not in ("rule", "")
    assert "serves already" in promote(f"{NAME}@champion", "--why", "again")[1]


def test_a_promotion_that_was_cut_short_is_finished_by_asking_again(ledger, monkeypatch):
    def away(self, model, alias, version):
        raise LedgerError("MLflow is away")

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "set_alias", away)
        assert CliRunner().invoke(cli.app, ["promote", f"{NAME}/2", "--why", "faster"]).exit_code == 1
    assert aliases(ledger) == {}
    code, said = promote(f"{NAME}/2", "--why", "once more")
    assert (code, said["champion"], said["reasons"]) == (0, 2, ["faster"])
    assert aliases(ledger) == {"champion": 2, "challenger": 2}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "the reason is missing"),
        (["--force", "--why", "x"], "go with a policy"),
        (["--policy", "POLICY"], "nothing to look at"),
        (["--policy", "POLICY", "--data", "digits", "--force"], "requires a reason"),
        (["--policy", "POLICY", "--data", "{source: digit}"], "'digit' is unknown"),
        (["--policy", "POLICY", "--data", "digits", "--against", "nobody"], "no model 'nobody'"),
    ],
)
def test_what_does_not_go_together_is_told_before_anything_moves(ledger, tmp_path, arguments, told):
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "tests.yaml").write_text(TESTS)
    code, said = promote(f"{NAME}/2", *(str(tmp_path / "policy.yaml") if a == "POLICY" else a for a in arguments))
    assert code == 2 and told in said
    assert aliases(ledger) == {}


FIRST = "the first one, with accuracy 0.5 (95 % interval 0.4 to 0.6) on 20 rows"


def found(*, passes):
    """Results of an examination: an accuracy of 0.5, and one test that passes or fails."""
    test = TestResult(test="right", kind="minimum", num_cases=20, num_failures=0 if passes else 18)
    whole = SliceMetric(metric="accuracy", slice="all", num_rows=20, value=0.5, low=0.4, high=0.6, level=0.95)
    return [ExaminationResult(num_rows=20, measured=(whole,), tests=(test,))]


def test_what_a_policy_refuses_a_person_may_force(ledger, tmp_path, monkeypatch):
    (tmp_path / "policy.yaml").write_text("name: careful\n")
    asked, told = [], []
    monkeypatch.setattr(models, "emit_pool_alarm", told.append)

    def examine_by(policy, models, *, data, all_rows, against, against_data, num_devices, notice):
        assert not all_rows
        for model in models:
            asked.append((policy.name, model.label, data.source, against))
            yield found(passes=model.label.endswith("/1"))

    monkeypatch.setattr(examine, "examine_by", examine_by)
    by = ["--policy", str(tmp_path / "policy.yaml"), "--data", "digits"]
    code, said = promote(f"{NAME}/1", *by)
    assert (code, said["promoted"], said["champion"], said["champion_before"]) == (0, True, 1, None)
    assert said["reasons"] == [FIRST]
    assert (said["compared"]["num_rows"], said["compared"]["low"], said["compared"]["high"]) == (20, 0.4, 0.6)
    assert last(ledger, 1).who == "policy careful"
    monkeypatch.setattr(examine, "find", lambda name, home: None)  # no comparison: this test is about the decision
    code, said = promote(f"{NAME}/2", *by)
    assert (code, said["champion"], said["reasons"]) == (1, 1, ["right: 18 of 20 fail", FIRST])
    assert aliases(ledger) == {"champion": 1, "challenger": 2}
    assert last(ledger, 2).outcome == "kept"
    assert [alarm.message for alarm in told] == [f"{NAME} version 2 is not promoted: right: 18 of 20 fail; {FIRST}"]
    code, said = promote(f"{NAME}/2", *by, "--force", "--why", "the old one burns")
    assert (code, said["champion"]) == (0, 2)
    kept = last(ledger, 2)
    assert kept.reasons == tuple(said["reasons"]) and kept.reasons[0] == "right: 18 of 20 fail"
    assert kept.reasons[-1].endswith(": the old one burns") and kept.who in kept.reasons[-1]
    assert asked[0] == ("careful", f"{NAME}/1", "digits", None)
    assert len(told) == 1, "what is promoted, by force too, is not an alarm"


def test_a_model_that_breaks_a_limit_gives_way_to_the_child_that_keeps_it(ledger, home, tmp_path, monkeypatch):
    (tmp_path / "policy.yaml").write_text(
        "name: quick\nsignificance: null\nmetric: accuracy\nlimits: {latency/p99_s: {at_most: 0.02}}\n"
    )
    seconds = {"pretrained": 0.05, "distilled": 0.03, "quantized": 0.01}

    def examine_by(policy, models, *, data, all_rows, against, against_data, num_devices, notice):
        for model in models:
            (result,) = found(passes=True)
            told = dict.fromkeys(("value", "low", "high"), seconds[model.record.kind])
            p99 = replace(result.measured[0], metric="latency/p99_s", **told)
            yield [replace(result, measured=(*result.measured, p99), tests=())]

    monkeypatch.setattr(examine, "examine_by", examine_by)
    asked = [f"{NAME}/1", "--policy", tmp_path / "policy.yaml", "--data", "digits"]
    code, said = promote(*asked)
    assert (code, said["promoted"]) == (1, False)
    assert said["reasons"][-1].endswith("To fix: --shrink trains some")

    trained = []

    def train(batch, options):
        """Records what the batch would make; the first time, only a part before it is interrupted."""
        assert not options.resume
        trained.append(batch)
        parent = ledger.resolve_model(f"models:/{NAME}/1")
        if len(trained) == 1:
            return SimpleNamespace(status="interrupted", exit_code=1)
        for kind in ("distilled", "quantized"):
            folder = exported(home / kind, IMAGES, cache_dir=home / "cache", seed=9)
            run = ledger.start_job(ledger.start_batch("smaller", params={}), kind, params={})
            ledger.record_model(f"smaller.{kind}", run_id=run, folder=folder, kind=kind, parents=[parent.model_id])
        return SimpleNamespace(status="done", exit_code=0)

    monkeypatch.setattr(running, "train_and_show", train)
    training = SimpleNamespace(job=IMAGES)
    monkeypatch.setattr(shrinking, "RecordedTraining", SimpleNamespace(of=lambda home, node: training))
    monkeypatch.setattr(shrinking, "missing_extra", lambda extra, feature: None)
    (before,) = promotion.read_decisions(ledger, ledger.resolve_model(f"models:/{NAME}/1"))[-1:]
    result = CliRunner().invoke(cli.app, ["promote", *map(str, asked), "--shrink"])
    assert (result.exit_code, last(ledger, 1)) == (1, before), "an interruption is not a refusal"
    training.job = replace(IMAGES, num_steps=IMAGES.num_steps + 1)  # another plan, as of another measured latency
    code, said = promote(*asked, "--shrink")
    assert code == 0 and trained[1] == trained[0], "what was begun is continued"
    told = "\n".join(said["reasons"])
    assert f"{NAME}/1 breaks a limit: its latency/p99_s is 0.05, and the policy allows at most 0.02" in told
    assert "latency/p99_s 0.03): its latency/p99_s is 0.03" in told
    assert "latency/p99_s 0.01): it keeps every rule" in told
    champion = ledger.get_alias(NAME, "champion")
    assert (champion.version, champion.kind) == (said["version"], "quantized")
    students = {job.name: (job.model.config, job.adaptation.teacher or job.base) for job in trained[0].jobs}
    assert students["digits-int8"][1] == f"models:/{NAME}/1"

    ledger.client.delete_registered_model_alias(NAME, "champion")
    code, again = promote(*asked, "--shrink")  # the child is known by now: nothing is trained
    assert (code, again["version"], len(trained)) == (0, said["version"], 2)
    ledger.client.delete_model_version(NAME, str(said["version"]))


@pytest.mark.full
def test_a_policy_examines_the_model_and_its_champion(ledger, tmp_path):
    policy, tests = tmp_path / "policy.yaml", tmp_path / "tests.yaml"
    policy.write_text(POLICY)
    tests.write_text(TESTS)
    code, said = promote(f"{NAME}/1", "--policy", policy, "--data", "digits")
    assert (code, said["champion"]) == (0, 1)
    assert said["reasons"][0].startswith("the first one, with accuracy")
    assert last(ledger, 1).who == "policy careful"
    tests.write_text(RIGHT)
    code, said = promote(f"{NAME}/2", "--policy", policy, "--data", "digits", "--against", f"{NAME}/3")
    assert (code, said["promoted"], said["champion"]) == (1, False, 1)
    assert any("right: " in reason and "of 20 fail" in reason for reason in said["reasons"])
    assert aliases(ledger) == {"champion": 1, "challenger": 2}
    assert last(ledger, 2).outcome == "kept"
    assert ledger.read_text(last_run(ledger, 2), "evaluation/metrics.svg").startswith("<svg")
    champion = ledger.get_alias(NAME, "champion")
    assert ">champion<" in ledger.read_text(champion.run_id, family_path(champion)), "its picture marks who serves"


def last_run(ledger, version):
    return ledger.resolve_model(f"models:/{NAME}/{version}").run_id


def test_a_name_alone_means_the_newest_version_that_is_still_there(ledger, home):
    folder = exported(home / "withdrawn", IMAGES, cache_dir=home / "cache", seed=4)
    run = ledger.start_job(ledger.start_batch("nights", params={}), "digits4", params={})
    made = ledger.record_model(NAME, run_id=run, folder=folder, kind="pretrained")
    ledger.client.delete_model_version(NAME, str(made.version))
    assert promote(NAME, "--why", "the newest")[1]["version"] == 3
