"""Promotion in a real registry: a policy's decision, the aliases, the records, and the rollback."""

import json
from pathlib import Path

import mlflow.store.tracking.sqlalchemy_store
import pytest

from ringmaster.errors import InputError, LedgerError, PromotionRefused
from ringmaster.flows.sweep_form import Sweep, check_name
from ringmaster.model_lineage import Ledger, Origin, snapshot
from ringmaster.model_lineage.model_pages import family_path
from ringmaster.model_lineage.snapshot import DAY_MS, Snapshot, collect, unreached
from ringmaster.model_lineage.tensors import TensorStore
from ringmaster.tasks.retraining import promotion
from ringmaster.tasks.retraining.policy import PromotionDecision
from ringmaster.tasks.retraining.promotion import MoveLog
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.sweeping.results import challenge
from tests.matrix import matrix

NAME = "shop.prices"
NO = PromotionDecision(promote=False, why="worse")
YES = PromotionDecision(promote=True, why="better", reasons=("better: loss 1 against 2", "p 0.01"))


@pytest.fixture
def ledger(tmp_path):
    return Ledger(f"sqlite:///{tmp_path / 'mlflow.db'}", artifact_root=tmp_path / "artifacts")


@pytest.fixture
def log(tmp_path):
    database = Database(file_url(tmp_path / "promotions.db"))
    notices = []
    log = MoveLog(database, notice=notices.append)
    log.notices = notices
    yield log
    database.close()


@pytest.fixture
def versions(ledger, tmp_path):
    batch = ledger.start_batch("nights", params={})
    of = Origin(job="prices", retraining="shop")
    return [ledger.record_model(NAME, run_id=run_of(ledger, batch, i), folder=files(tmp_path, i), kind="pretrained",
            origin=of) for i in (1, 2, 3)]  # fmt: skip


def run_of(ledger, batch, number):
    return ledger.start_job(batch, f"prices{number}", params={})


def files(folder: Path, number: int) -> Path:
    made = folder / f"model{number}"
    made.mkdir()
    (made / "weights").write_text(str(number))
    return made


def aliases(ledger):
    found = {alias: ledger.get_alias(NAME, alias) for alias in ("champion", "previous", "challenger")}
    return {alias: record.version for alias, record in found.items() if record is not None}


class Away:
    """A ledger whose server fails after a number of alias changes."""

    def __init__(self, ledger, moves):
        self._ledger, self._moves = ledger, moves

    def __getattr__(self, name):
        return getattr(self._ledger, name)

    def set_alias(self, *arguments):
        if self._moves == 0:
            raise LedgerError("MLflow is away")
        self._moves -= 1
        self._ledger.set_alias(*arguments)


def test_promotions_rollbacks_and_their_records(ledger, log, versions):
    for champion, record in enumerate(versions[:2]):
        promotion.apply(ledger, record, YES, log=log, champion=champion or None, who="policy careful")
    assert aliases(ledger) == {"champion": 2, "previous": 1, "challenger": 2}
    (kept,) = promotion.read_decisions(ledger, versions[1])
    assert (kept.outcome, kept.reasons, kept.champion_before, kept.who) == (
        "promoted",
        YES.reasons,
        1,
        "policy careful",
    )
    table = json.loads(ledger.read_text(versions[1].run_id, promotion.TABLE))
    assert table["data"][0][table["columns"].index("reasons")] == "better: loss 1 against 2\np 0.01"

    # A version that waits for a person stays a candidate, so that the next retraining run asks for approval again.
    promotion.leave_waiting(ledger, versions[2], "nobody answered", who="policy careful")
    assert promotion.standings(ledger, [NAME])[NAME].candidate == versions[2]
    assert promotion.read_decisions(ledger, versions[2])[-1].outcome == "waiting"

    with pytest.raises(LedgerError, match="away"):
        promotion.apply(Away(ledger, 1), versions[2], YES, log=log, champion=2)
    assert aliases(ledger) == {"champion": 2, "previous": 2, "challenger": 2}
    assert log.finish_left_behind(ledger) == [NAME]
    assert aliases(ledger) == {"champion": 3, "previous": 2, "challenger": 3}
    assert promotion.read_decisions(ledger, versions[2])[-1].outcome == "promoted"

    assert promotion.roll_back(ledger, NAME, log=log, who="Ann", why="it is slow") == (2, 3)
    assert aliases(ledger) == {"champion": 2, "previous": 1, "challenger": 3}
    rows = ledger.read_table(versions[2].run_id, promotion.TABLE)
    assert [row["outcome"] for row in rows] == ["waiting", "promoted", "rolled back"]
    last = promotion.read_decisions(ledger, versions[2])[-1]
    assert (last.outcome, last.reasons, last.who) == ("rolled back", ("it is slow",), "Ann")
    assert promotion.roll_back(ledger, NAME, log=log, who="Ann") == (1, 2)
    assert aliases(ledger) == {"champion": 1, "challenger": 3}
    with pytest.raises(PromotionRefused):
        promotion.roll_back(ledger, NAME, log=log, who="Ann")


def test_what_was_begun_of_a_model_that_was_deleted_since_is_dropped(ledger, log, versions):
    with pytest.raises(LedgerError, match="away"):
        promotion.apply(Away(ledger, 1), versions[2], YES, log=log, champion=None)
    assert promotion.standings(ledger, [NAME])[NAME].latest == versions[2]
    ledger.client.delete_registered_model(NAME)
    assert log.finish_left_behind(ledger) == []
    assert "is set aside" in log.notices[0] and "no version 3 any more" in log.notices[0]
    assert promotion.standings(ledger, [NAME])[NAME] == promotion.ServingVersions(name=NAME)


def test_a_version_that_was_deleted_is_not_promoted_and_no_alias_moves(ledger, log, versions):
    for champion, record in enumerate(versions[:2]):
        promotion.apply(ledger, record, YES, log=log, champion=champion or None)
    ledger.client.delete_model_version(NAME, "3")
    with pytest.raises(PromotionRefused, match="no version 3 any more"):
        promotion.apply(ledger, versions[2], YES, log=log, champion=2)
    assert aliases(ledger) == {"champion": 2, "previous": 1, "challenger": 2}


def test_a_rollback_goes_back_though_the_champion_before_that_one_was_deleted(ledger, log, versions):
    for champion, record in enumerate(versions):
        promotion.apply(ledger, record, YES, log=log, champion=champion or None)
    ledger.client.delete_model_version(NAME, "1")
    assert promotion.roll_back(ledger, NAME, log=log, who="Ann") == (2, 3)
    assert aliases(ledger) == {"champion": 2, "challenger": 3}
    assert promotion.read_decisions(ledger, versions[2])[-1].outcome == "rolled back"


# A run that is deleted and still in the database is read as others are.
@pytest.mark.parametrize("is_collected", matrix([False, True], quick=[True]))
def test_a_run_that_was_deleted_costs_a_note(ledger, log, versions, tmp_path, is_collected):
    for champion, record in enumerate(versions):
        promotion.apply(ledger, record, YES, log=log, champion=champion or None)
    ledger.client.delete_run(versions[2].run_id)
    if is_collected:  # as `mlflow gc` does
        url = f"sqlite:///{tmp_path / 'mlflow.db'}"
        mlflow.store.tracking.sqlalchemy_store.SqlAlchemyStore(url, str(tmp_path))._hard_delete_run(versions[2].run_id)
    assert promotion.roll_back(ledger, NAME, log=log, who="Ann") == (2, 3)
    assert aliases(ledger) == {"champion": 2, "previous": 1, "challenger": 3}
    assert promotion.read_decisions(ledger, versions[2])[-1].outcome == "rolled back"
    assert ["models:/shop.prices/3 has the decision" in text for text in log.notices] == [True] * is_collected
    assert log.finish_left_behind(ledger) == []
    promotion.apply(ledger, versions[2], YES, log=log, champion=2)
    assert aliases(ledger)["champion"] == 3


def test_a_model_becomes_a_version_of_another_name_once(ledger, versions, tmp_path):
    assert ledger.add_version(versions[2], "shop.best", text="The best of three").version == 1
    again = ledger.add_version(versions[2], "shop.best")
    assert (again.registered_name, again.version, again.model_id) == ("shop.best", 1, versions[2].model_id)
    assert promotion.standings(ledger, ["shop.best"])["shop.best"].latest == again
    recorded = ledger.record_model(NAME, run_id=versions[2].run_id, folder=tmp_path / "model3", kind="pretrained")
    assert recorded == versions[2]  # recorded again, after a crash, it keeps both names
    assert ledger.resolve_model(again.model_id) == again
    assert ledger.tagged("no.such") == {}
    ledger.client.create_registered_model("shop.tagged", tags={"mine": "x"})
    assert ledger.tagged("mine") == {"shop.tagged": "x"}


def test_a_model_of_two_names_is_found_by_both_and_kept_for_an_alias_of_either(ledger, versions, tmp_path):
    ledger.set_alias(NAME, "champion", 2)
    ledger.add_version(versions[1], "shop.best")
    snapshot = Snapshot.of(ledger, cache=tmp_path / "cache")
    for name in (NAME, f"{NAME}/2", f"{NAME}@champion"):
        assert (snapshot.find(name).id, snapshot.find(name).label) == (versions[1].model_id, f"{NAME}/2")
    assert snapshot.find("shop.best").label == "shop.best/1"
    assert snapshot.find(versions[1].model_id).carrying("champion").label == f"{NAME}/2"
    later_ms = snapshot.models[-1].created_ms + DAY_MS
    dropped = unreached(snapshot, now_ms=later_ms, least_age_days=0)
    assert [node.label for node in dropped] == [f"{NAME}/3", f"{NAME}/1"]

    ledger.client.delete_registered_model_alias(NAME, "champion")
    snapshot = Snapshot.of(ledger, cache=tmp_path / "cache")
    store = TensorStore(tmp_path / "tensors")
    collect(ledger, store, snapshot, unreached(snapshot, now_ms=later_ms, least_age_days=0))
    assert ledger.client.search_model_versions("") == []


def test_the_jobs_that_have_made_models_of_a_name_are_known(ledger, versions):
    ledger.add_version(versions[0], "shop.best")
    assert (ledger.jobs_of(NAME), ledger.jobs_of("shop.best")) == (["prices"], [])


def swept(ledger, folder, sweep, number):
    """The model of a trial of a sweep."""
    run = run_of(ledger, ledger.start_batch(sweep, params={}), number)
    name, origin = f"{sweep}.trial-{number}", Origin(job=f"trial-{number}")
    made = ledger.record_model(name, run_id=run, folder=files(folder, number), kind="pretrained", origin=origin)
    return made.uri


def test_a_sweep_challenges_a_registered_model_of_others_only_where_its_file_says_so(ledger, versions, tmp_path):
    ledger.set_alias(NAME, "champion", 3)
    trial = swept(ledger, tmp_path, NAME, 4)
    with pytest.raises(InputError, match=r"registered model shop\.prices, of which batch shop has made versions"):
        check_name(form_of(NAME), ledger)
    with pytest.raises(LedgerError, match=r"To fix: rename the sweep, or set `challenger_of: shop\.prices`"):
        challenge(ledger, trial, sweep=NAME, challenger_of="")
    assert aliases(ledger) == {"champion": 3}
    check_name(form_of(NAME, challenger_of=NAME), ledger)
    assert challenge(ledger, trial, sweep=NAME, challenger_of=NAME).version == 4
    assert standing(ledger).candidate.version == 4


def test_the_best_trial_of_a_sweep_alone_is_no_candidate_before_its_file_says_so(ledger, log, tmp_path):
    first, second = (swept(ledger, tmp_path, NAME, number) for number in (1, 2))
    for number, trial in enumerate([first, second], start=1):  # a sweep may be run again
        check_name(form_of(NAME), ledger)
        assert challenge(ledger, trial, sweep=NAME, challenger_of="").version == number
        assert aliases(ledger) == {"challenger": number}
    found = standing(ledger)
    assert (found.candidate, found.challenger, found.foreign) == (None, None, 2)
    challenge(ledger, second, sweep=NAME, challenger_of=NAME)
    assert standing(ledger).candidate.version == 2


def test_names_that_other_versions_only_begin_with_are_free_for_sweeps(ledger, versions):
    for name in ("shop", "shop.prices.trial-1", "shop.prices.x"):
        check_name(form_of(name), ledger)


def test_a_model_of_another_program_is_no_sweeps(ledger):
    ledger.client.create_registered_model("foreign")
    run = ledger.start_batch("b", params={})
    ledger.client.create_model_version("foreign", source="file:///x", run_id=run)
    with pytest.raises(InputError, match="of which another program has made versions"):
        check_name(form_of("foreign"), ledger)


def form_of(name, **given):
    return Sweep(name=name, template={"job": {}}, space={"seed": [0, 1]}, **given)


def standing(ledger):
    return promotion.standings(ledger, [NAME])[NAME]


def test_pages_and_pictures_say_what_was_decided_about_a_version(ledger, versions, log, tmp_path):
    for number, decision, champion in ((1, YES, None), (2, NO, 1), (3, YES, 1)):
        promotion.apply(ledger, versions[number - 1], decision, log=log, champion=champion, who="rule")
    promotion.roll_back(ledger, NAME, log=log, who="me")
    shown = {1: "champion", 2: "rejected", 3: "rolled back"}
    lineage = Snapshot.of(ledger, cache=tmp_path / "cache")
    for number, state in shown.items():
        record = versions[number - 1]
        assert lineage.find(record.model_id).states == (state,)
        assert f">{state}<" in ledger.read_text(record.run_id, family_path(record))
        page = ledger.client.get_model_version(NAME, str(number)).description
        assert page.count("- state: ") == 1 and f"\n- state: {state}\n" in page
    *_, of_client = snapshot._read_client(ledger, tmp_path / "rows.json", is_fresh=True)
    *_, of_file = snapshot.read_rows(ledger, cache=tmp_path)
    assert of_client == of_file == {(NAME, 1): "promoted", (NAME, 2): "kept", (NAME, 3): "rolled back"}
