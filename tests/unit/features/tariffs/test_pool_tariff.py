"""A tariff of a pool: set by a command, stored with the pool, and followed by the plans of all its batches."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from threading import Thread

import pytest
from typer.testing import CliRunner

from ringmaster.codec import to_json
from ringmaster.errors import BatchFileError
from ringmaster.features.quotas.job import UserQuota
from ringmaster.features.quotas.pool_quotas import quotas_of_pool, set_quotas
from ringmaster.features.tariffs.pages import KEY, SpendingReport
from ringmaster.features.tariffs.pool_tariff import load_tariff, set_tariffs, tariffs_of_pool
from ringmaster.features.tariffs.series import HOUR_S, Series
from ringmaster.features.tariffs.terms import FormerTariffs, Spending, Tariff, Tariffs
from ringmaster.flows.cli import app
from ringmaster.tasks.control.batch_terms import ActiveBatch, PoolTerms, combined_terms
from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem
from ringmaster.tasks.planning.objectives import PlanningTerms
from ringmaster.tasks.planning.term_features import DeviceUse, resumed_features, terms_features
from ringmaster.tasks.pool.active_batches import FEATURES, features_of_pool
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import Journal
from tests.unit.execution.fakes import open_journal
from tests.unit.pool.bench import EPOCH_S, Clock, PoolBench, set_pool, submission
from tests.unit.pool.workers import Worker

DEAR, CHEAP = (Tariffs(every=Tariff(price=Series.constant(value))) for value in (7.2, 3.6))
OF_COST = PlanningTerms(objective="cost")


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


def test_the_plans_of_all_batches_follow_the_pools_tariff_from_then_on(database):
    pool, worker = PoolBench(database, Clock()), Worker(database, num_devices=4)
    pool.pass_seconds(1, worker)
    own = Tariffs(every=Tariff(price=Series.constant(36.0)), max_money=3.0)
    pool.submit(submission("b1", terms=PlanningTerms(objective="cost", features=(own,))))
    assert pool.plans[-1].nodes[0].price_steps == ((0.0, 0.01),)
    set_tariffs(database, DEAR)
    num_plans = len(pool.plans)
    pool.pass_seconds(2, worker)
    assert len(pool.plans) > num_plans and pool.plans[-1].nodes[0].price_steps == ((0.0, 0.002),)
    assert pool.plans[-1].budgets["cost"] == pytest.approx(3.0, abs=0.1)
    set_tariffs(database, CHEAP)
    pool.pass_seconds(2, worker)
    after = PoolBench(database, pool.clock)  # another controller
    after.step()
    assert after.plans[-1].nodes[0].price_steps == ((0.0, 0.001),)
    set_tariffs(database, None)
    after.pass_seconds(2, worker)
    assert after.plans[-1].nodes[0].price_steps == ((0.0, 0.01),)
    removed = tariffs_of_pool(database)
    assert removed.is_empty and [each.every for each in removed.former] == [DEAR.every, CHEAP.every]
    set_tariffs(database, None)
    assert tariffs_of_pool(database) == removed


def test_of_changes_at_once_by_several_processes_none_is_lost(database):
    others = [
        Thread(target=set_quotas, args=(database, {"bo": UserQuota(max_devices=2)})),
        Thread(target=set_tariffs, args=(database, DEAR)),
    ]

    def change(facts):
        for other in others if others[0].ident is None else ():
            other.start()  # they wait for this transaction
        own = {"users": {"al": {"max_devices": 1}}}
        return {FEATURES: {**facts.get(FEATURES, {}), "quotas": own, "of_others": {}}}

    journal = Journal(database, batch="")
    assert set(journal.change_facts(change, FEATURES)[FEATURES]) == {"quotas", "of_others"}
    for other in others:
        other.join()
    assert set(quotas_of_pool(database).users) == {"al", "bo"}
    assert (
        set(journal.get(FEATURES)) == {"quotas", "of_others", "tariffs"}
        and tariffs_of_pool(database).every == DEAR.every
    )


def test_a_tariff_that_cannot_be_read_stops_no_controller(database, caplog):
    Journal(database, batch="").put_all({FEATURES: {"tariffs": {"every": 3}, "of_others": {}}, "revision": 1})
    assert features_of_pool(database) == () and "the pool's tariffs cannot be read" in caplog.text
    pool = PoolBench(database, Clock())
    pool.pass_seconds(1, Worker(database))
    pool.submit(submission("b1"))
    assert pool.plans


def test_what_was_spent_counts_by_the_tariff_that_held_then(database):
    journal = Journal(database, batch="")
    set_tariffs(database, DEAR)
    journal.put(FEATURES, {"tariffs": {**journal.get(FEATURES)["tariffs"], "since_s": EPOCH_S}})
    former = FormerTariffs(until_s=EPOCH_S + HOUR_S, every=DEAR.every)
    new = CHEAP.replacing(tariffs_of_pool(database), now_s=EPOCH_S + HOUR_S)
    assert (new.since_s, new.former) == (EPOCH_S, (former,))
    use = DeviceUse(node="n", num_devices=2, started_s=EPOCH_S + HOUR_S / 2, ended_s=EPOCH_S + 2 * HOUR_S)
    assert new.spent(use) == Spending(money=pytest.approx(2 * (3.6 + 3.6)), emissions_g=None, energy_j=None)
    assert new.spent(use, energy_j=9.0).energy_j == pytest.approx(9.0)
    before = DeviceUse(node="n", num_devices=1, started_s=EPOCH_S - HOUR_S, ended_s=EPOCH_S)
    own = Tariffs(every=Tariff(price=Series.constant(1.0)), max_money=5.0)
    both = Tariffs.combined([own], of_pool=new)
    assert both.spent(before).money == pytest.approx(1.0) and both.max_money == 5.0
    long_ago = DEAR.replacing(new, now_s=EPOCH_S + 91 * 24 * HOUR_S)
    assert [each.until_s for each in long_ago.former] == [EPOCH_S + 91 * 24 * HOUR_S]
    assert CHEAP.replacing(new, now_s=EPOCH_S + 2 * HOUR_S) == new, "the same tariff replaces nothing"


def test_what_was_spent_under_a_tariff_that_was_removed_counts_by_it():
    day_s = EPOCH_S + 24 * HOUR_S
    removed = Tariffs().replacing(replace(CHEAP, since_s=EPOCH_S), now_s=EPOCH_S + HOUR_S)
    again = DEAR.replacing(removed, now_s=EPOCH_S + 2 * HOUR_S)
    own = Tariffs(every=Tariff(price=Series.constant(1.0)), max_money=20.0)
    use = DeviceUse(node="n", num_devices=1, started_s=EPOCH_S - HOUR_S, ended_s=EPOCH_S + 3 * HOUR_S)

    def money(of_pool, *owns):
        return Tariffs.combined(owns, of_pool=of_pool).spent(use).money

    assert money(removed, own) == pytest.approx(1.0 + 3.6 + 1.0 + 1.0)
    assert money(removed, None) == pytest.approx(3.6 + 3.6), "without a tariff of its own, the first one counts before"
    assert money(again, own) == pytest.approx(1.0 + 3.6 + 1.0 + 7.2)
    assert Tariffs.combined([own], of_pool=removed).left(lambda: [use], now_s=day_s) == {"cost": pytest.approx(13.4)}
    assert list(own.findings(objective="cost", of_pool=removed)) == [] and list(removed.in_words()) == []


def test_a_batch_is_resumed_with_the_values_that_its_files_have_now():
    before, now = {Tariffs.key: to_json(DEAR)}, {Tariffs.key: to_json(CHEAP)}
    (resumed,) = terms_features(resumed_features(before, now, now_s=EPOCH_S))
    assert resumed.every == CHEAP.every and resumed.former == (FormerTariffs(until_s=EPOCH_S, every=DEAR.every),)
    use = DeviceUse(node="n", num_devices=1, started_s=EPOCH_S - HOUR_S, ended_s=EPOCH_S + HOUR_S)
    assert resumed.spent(use).money == pytest.approx(7.2 + 3.6)
    assert resumed_features(before, before, now_s=EPOCH_S) == before
    bounded = {Tariffs.key: to_json(replace(DEAR, max_money=4.0))}
    assert resumed_features(before, bounded, now_s=EPOCH_S) == bounded, "a bound may be all that was changed"
    assert resumed_features({}, now, now_s=EPOCH_S) == now


def test_nodes_without_a_price_beside_priced_ones_cost_nothing_in_plans_and_in_results():
    priced = Tariffs(nodes={"spot": Tariff(price=Series.constant(7.2))}, max_money=9.0)
    nodes = (PlanningNode("own", 1), PlanningNode("spot", 1))
    problem = Problem("p", nodes, (PlanningJob("a", (Option("single", 1, 60.0),)),))
    terms = PlanningTerms(objective="cost", price_per_device_hour=3.6, features=(priced,))
    own, spot = terms.on(problem).nodes
    assert (own.price, own.price_steps, spot.price_steps) == (0.0, ((0.0, 0.0),), ((0.0, 0.002),))
    uses = [DeviceUse(node=name, num_devices=1, started_s=0.0, ended_s=HOUR_S) for name in ("own", "spot")]
    assert [priced.spent(use).money for use in uses] == [0.0, pytest.approx(7.2)]
    later = CHEAP.replacing(replace(priced, since_s=0.0), now_s=HOUR_S)
    assert [later.spent(use).money for use in uses] == [0.0, pytest.approx(7.2)]
    assert list(priced.in_words())[-1] == "nodes without a price of their own cost nothing"
    (node, _) = PlanningTerms(objective="cost", price_per_device_hour=3.6).on(problem).nodes
    assert node.price == pytest.approx(0.001), "where nothing has another price, this one counts"


def test_a_pool_without_batches_has_no_bound():
    terms = combined_terms((), of_pool=PoolTerms(features=(CHEAP,)))
    assert terms.features == (CHEAP,)
    active = ActiveBatch(id="x", name="x", job_names=("a",), given=OF_COST, started_s=0.0)
    assert combined_terms([active], of_pool=PoolTerms(features=(CHEAP,))).features == (CHEAP,)


def test_the_result_of_a_batch_counts_by_the_pools_tariff(tmp_path):
    journal = open_journal(tmp_path)
    assert SpendingReport().batch_results(_Batch, journal, since_s=0.0) == {}
    set_tariffs(journal.database, CHEAP)
    assert SpendingReport().batch_results(_Batch, journal, since_s=0.0)[KEY]["planned"] is None
    set_tariffs(journal.database, None)
    assert SpendingReport().batch_results(_Batch, journal, since_s=0.0) == {}


class _Batch:
    terms, objective = OF_COST, "cost"


TARIFF = """
price: prices.csv
carbon: 300
time_zone: Europe/Berlin
tariffs:
  spot-1: {price: 0.25, power_w: 100}
"""


def write_tariff(folder, *, text=TARIFF):
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    rows = [f"{datetime.fromtimestamp(hour.timestamp() + k * HOUR_S, UTC).isoformat()},{k}" for k in range(2)]
    (folder / "prices.csv").write_text("\n".join(["time,value", *rows]))
    (folder / "tariff.yaml").write_text(text)
    return str(folder / "tariff.yaml")


def test_a_tariff_is_set_shown_and_removed_by_a_command(tmp_path, monkeypatch):
    set_pool(monkeypatch, tmp_path)

    def run(*words):
        return CliRunner().invoke(app, ["pool", "tariff", *words], catch_exceptions=True)

    assert run().output == "the pool has no tariff: batches give their own\n"
    done = run(write_tariff(tmp_path))
    assert "tariffs.spot-1 is the tariff of no node that is there; a node that joins later" in done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("tariff: price 0 to 1 (") and first.endswith("a device-hour, carbon 300 g CO2e a kWh")
    assert second == "tariff of spot-1: price 0.25 a device-hour, power 100 W a device"
    assert run().stdout == done.stdout
    assert first in CliRunner().invoke(app, ["status"]).output
    stored = json.loads(run("--json").stdout)["tariff"]
    assert stored["every"]["price"]["values"] == [0.0, 1.0] and "former" not in stored
    assert run("none").stdout == "the pool has no tariff: batches give their own\n"
    assert json.loads(run("--json").stdout) == {"tariff": None}


def test_all_faults_of_a_tariff_are_refused_with_their_lines(tmp_path):
    text = "price: [1, 2]\ncarbon: absent.csv\npower_w: .inf\nat_most: {money: 1}\ntariffs: {a: {until: soon}}\n"
    with pytest.raises(BatchFileError) as caught:
        load_tariff(tmp_path / write_tariff(tmp_path, text=text))
    found = [str(fault) for fault in caught.value.faults]
    assert [text.partition(": ")[0] for text in found] == [f"tariff.yaml:{line}" for line in range(1, 6)]
    with pytest.raises(BatchFileError, match="it says nothing"):
        load_tariff(tmp_path / write_tariff(tmp_path, text="time_zone: UTC\ntariffs: {n1: {}}"))
