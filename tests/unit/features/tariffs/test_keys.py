"""Tariffs in batch files: read into terms of plans, and refused with all their faults at once."""

import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
import typer
import yaml
from typer.testing import CliRunner

from ringmaster.errors import BatchFileError, ProblemError
from ringmaster.features.tariffs.commands import with_wait, without_bounds
from ringmaster.features.tariffs.series import DAY_S, HOUR_S, Series
from ringmaster.features.tariffs.terms import Spending, Tariff, Tariffs
from ringmaster.features.what_if.commands import whatif
from ringmaster.tasks.batch import Batch, load_batch
from ringmaster.tasks.batch.placement import check_placement
from ringmaster.tasks.control.batch_terms import ActiveBatch, combined_terms
from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem
from ringmaster.tasks.planning.objectives import PlanningTerms
from ringmaster.tasks.planning.term_features import DeviceUse

JOB = {
    "name": "a",
    "model": {"architecture": "GPT2LMHeadModel", "config": {"n_embd": 8, "n_layer": 1, "n_head": 1}},
    "data": {"source": "python-stdlib", "seq_len": 8, "vocab_size": 512},
    "num_steps": 4,
}
HOURS = [float(hour) for hour in range(24)]
NOW = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)


def load(tmp_path, **keys):
    file = tmp_path / "batch.yaml"
    file.write_text(yaml.safe_dump({"jobs": [JOB], **keys}, sort_keys=False))
    return load_batch(file)


def faults(tmp_path, **keys):
    with pytest.raises(BatchFileError) as caught:
        load(tmp_path, **keys)
    return [str(fault) for fault in caught.value.faults]


def write_hours(tmp_path, *values, begins=NOW):
    lines = [f"{(begins + timedelta(hours=k)).isoformat()},{value}" for k, value in enumerate(values)]
    (tmp_path / "prices.csv").write_text("\n".join(["time,value", *lines]))


def problem(*nodes, runtime_s=HOUR_S):
    return Problem("p", nodes or (PlanningNode("n0", 2),), (PlanningJob("a", (Option("single", 1, runtime_s),)),))


def tariffs_of(batch):
    (tariffs,) = batch.terms.features
    return tariffs


def test_the_keys_become_steps_of_nodes_from_now_on(tmp_path):
    write_hours(tmp_path, 3.6, 7.2, begins=NOW)
    batch = load(
        tmp_path,
        objective="cost",
        price="prices.csv",
        carbon=HOURS,
        power_w=300.0,
        time_zone="UTC",
        at_most={"money": 2.5, "carbon_kg": 1.5},
        tariffs={"n1": {"price": 1.8, "power_w": 100.0, "until": (NOW + timedelta(hours=5)).isoformat()}},
    )
    assert Batch.from_json(batch.to_json()) == batch
    now_s = NOW.timestamp() + 600.0
    planned = batch.terms.on(problem(PlanningNode("n0", 2), PlanningNode("n1", 1)), wall_clock=lambda: now_s)
    first, second = planned.nodes
    assert first.price_steps == ((0.0, 0.001), (3000.0, 0.002))
    assert [value for _, value in first.carbon_steps[:2]] == [NOW.hour, (NOW.hour + 1) % 24]
    assert (first.power_w, first.available_until_s) == (300.0, None)
    assert second.price_steps == ((0.0, 0.0005),)
    assert (second.power_w, second.available_until_s) == (100.0, 5 * HOUR_S - 600.0)
    assert planned.budgets == {"cost": 2.5, "emissions": 1500.0}


def test_a_trade_off_counts_hours_money_and_kilograms(tmp_path):
    worth = {"hour": 7.2, "money": 2.0, "carbon_kg": 0.5}
    batch = load(tmp_path, objective="trade-off", price=1.0, trade_off=worth)
    assert batch.terms.on(problem()).factors == {"end": 0.002, "cost": 2.0, "emissions": 0.0005}


def test_a_batch_without_tariffs_is_as_before(tmp_path):
    batch = load(tmp_path)
    assert batch.terms.features == () and "planning" not in batch.to_json()
    assert batch.terms.on(problem()) == problem()


def test_power_must_be_known_where_energy_counts(tmp_path):
    terms = load(tmp_path, carbon=HOURS, time_zone="UTC").terms
    with pytest.raises(ProblemError, match="node n0: nothing says what power its devices take"):
        terms.on(problem())
    (node,) = terms.on(problem(PlanningNode("n0", 2, power_w=70.0))).nodes  # as NVML says
    assert node.power_w == 70.0


def test_what_was_spent_is_not_refunded():
    every = Tariff(price=Series.constant(3.6), carbon=Series.constant(100.0), power_w=1000.0)
    tariffs = Tariffs(every=every, max_money=10.0, max_emissions_g=500.0)
    now_s = NOW.timestamp()
    use = DeviceUse(node="n0", num_devices=2, started_s=now_s - 1800.0, ended_s=now_s)
    assert tariffs.spent(use) == Spending(money=3.6, emissions_g=100.0, energy_j=3.6e6)
    assert tariffs.spent(use, energy_j=1.8e6) == Spending(money=3.6, emissions_g=50.0, energy_j=1.8e6)
    terms = PlanningTerms(objective="cost", features=(tariffs,))
    planned = terms.on(problem(), wall_clock=lambda: now_s, past=lambda: [use, use])
    assert planned.budgets == {"cost": pytest.approx(2.8), "emissions": pytest.approx(300.0)}
    planned = terms.on(problem(), wall_clock=lambda: now_s, past=lambda: [use] * 9)
    assert planned.budgets == {"cost": 0.0, "emissions": 0.0}


def test_batches_of_a_pool_share_the_first_tariff_and_the_sum_of_their_bounds():
    def active(name, **limits):
        features = (Tariffs(every=Tariff(price=Series.constant(1.0)), **limits),) if limits else ()
        given = PlanningTerms(objective="cost", features=features)
        return ActiveBatch(id=name, name=name, job_names=("a",), given=given, started_s=0.0)

    both = combined_terms([active("x", max_money=2.0), active("y", max_money=3.0)])
    assert tariffs_of_terms(both).max_money == 5.0
    one = combined_terms([active("x", max_money=2.0), active("y")])
    assert tariffs_of_terms(one).max_money is None
    assert combined_terms([active("y")]).features == ()


def tariffs_of_terms(terms):
    (tariffs,) = terms.features
    return tariffs


def test_all_faults_of_all_keys_are_named_at_once(tmp_path):
    (tmp_path / "prices.csv").write_text("time,value\n2026-01-31T10:00,1\n2026-01-31T11:00Z,-2\n")
    found = faults(
        tmp_path,
        objective="makespan",
        price="prices.csv",
        energy_price=[1.0, -2.0],
        carbon="absent.csv",
        at_most={"money": 2},
        tariffs={"n1": {"price": HOURS, "until": "soon"}, "n2": {"until": "2020-01-01T00:00Z"}},
    )
    text = "\n".join(found)
    for part in (
        "prices.csv, line 2: 2026-01-31T10:00 has no time zone",
        "; line 3: -2 is negative",
        "or negative_prices: as-zero",
        "energy_price: has 2 of 24 values",
        "energy_price[1]: is -2.0",
        "there is no file 'absent.csv'",
        "tariffs.n1.price: has the hours of a day in no zone",
        "tariffs.n1.until: 'soon' is not a time",
        "tariffs.n2.until: 2020-01-01T00:00Z is over",
        "at_most: is kept under the objectives cost, emissions, trade-off alone",
    ):
        assert part in text
    assert all("batch.yaml:" in fault for fault in found)


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"time_zone": "Mars/Olympus", "price": HOURS}, "'Mars/Olympus' is not a time zone"),
        ({"objective": "trade-off"}, "belongs to it alone"),
        ({"trade_off": {"hour": 1.0}}, "belongs to it alone"),
        ({"objective": "trade-off", "trade_off": {}}, "counts nothing"),
        ({"price": 1.0, "price_per_device_hour": 2.0}, "is given beside other prices"),
        ({"price": True}, "price"),
        ({"carbon": -1.0, "negative_prices": "as-zero"}, "is -1.0"),
        ({"power_w": 0.0}, "power_w"),
        ({"tariffs": {"n1": {"prices": 1.0}}}, "did you mean `price`"),
    ],
)
def test_wrong_keys_are_refused(keys, part, tmp_path):
    assert part in "\n".join(faults(tmp_path, **keys))


def test_a_wrong_zone_hides_no_other_fault_and_wrong_types_are_said_once(tmp_path):
    write_hours(tmp_path, 1, 2)
    found = "\n".join(faults(tmp_path, time_zone=2, price="prices.csv", carbon=[-1.0, 2.0]))
    assert "time_zone: must be text" in found and "carbon[0]: is -1.0" in found and "no time zone" not in found
    found = faults(tmp_path, time_zone="Mars", price={"file": 3}, tariffs={"n1": {"carbon": True}})
    price, carbon, zone = sorted(found, key=lambda fault: fault.split(": ")[1])
    assert "price: must be a number, got a mapping" in price and price.endswith("a list of 24, the hours of the day.")
    assert "tariffs.n1.carbon: must be a number, got true" in carbon and "time_zone: 'Mars'" in zone


def placed(batch, *, nodes=("n1",), may_join=False, **options):
    notices = []
    options |= {"nodes": dict.fromkeys(nodes, "NVIDIA A100-SXM4-80GB"), "notice": notices.append if may_join else None}
    with suppress(BatchFileError):
        check_placement(batch, **options)
        return notices
    with pytest.raises(BatchFileError) as caught:
        check_placement(batch, **options)
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"objective": "emissions"}, "tmp:1: objective: is emissions, and nothing says them"),
        ({"objective": "cost", "at_most": {"money": 2.0}}, "at_most.money: is a bound, and nothing has a price"),
        ({"objective": "cost", "price": 1.0, "at_most": {"carbon_kg": 2.0}}, "what a kWh emits"),
        (
            {"tariffs": {"n2": {"price": 1.0}}},
            "tariffs.n2: is the tariff of no node that is there. To fix: name one of n1",
        ),
    ],
)
def test_what_a_pool_may_say_is_refused_where_nobody_says_it(keys, fault, tmp_path):
    (found,) = placed(load(tmp_path, **keys))
    assert fault.removeprefix("tmp:1: ") in found and re.match(r"batch:\d+: ", found)
    says_all = Tariff(price=Series.constant(1.0), carbon=Series.constant(1.0))
    of_pool = Tariffs(every=says_all, nodes={"n2": says_all})
    if "price" not in str(keys):
        assert placed(load(tmp_path, **keys), of_pool=(of_pool,)) == []


def test_a_node_that_may_join_later_is_a_notice_and_one_that_is_there_is_none(tmp_path):
    batch = load(tmp_path, tariffs={"n1": {"price": 1.0}, "spot-9": {"price": 0.4}})
    (notice,) = placed(batch, may_join=True)
    assert notice == "tariffs.spot-9 is the tariff of no node that is there; a node that joins later may have this name"
    assert placed(batch, nodes=["n1", "spot-9"]) == []


def test_a_tariff_of_a_kind_of_devices_is_refused_with_the_nodes_that_have_it(tmp_path):
    batch = load(tmp_path, tariffs={"a100": {"price": 1.0}, "H100": {"price": 2.0}})
    kind, absent = placed(batch, nodes=["n2", "n1"])
    assert "tariffs.a100: names a kind of devices, and tariffs are by node: n1, n2 have this kind" in kind
    assert kind.endswith("To fix: give the tariff to each of these nodes.") and "of no node that is there" in absent


def test_the_keys_of_a_batch_are_refused_where_the_pool_says_them(tmp_path):
    of_pool = Tariffs(every=Tariff(price=Series.constant(1.0)))
    batch = load(
        tmp_path, objective="cost", price=2.0, power_w=5.0, tariffs={"n1": {"price": 1.0}}, at_most={"money": 1}
    )
    found = placed(batch, of_pool=(of_pool,))
    assert [text.split(": ")[1] for text in found] == ["price", "power_w", "tariffs.n1"]
    assert all("is said by the pool, whose tariff holds for all batches" in text for text in found)
    assert placed(load(tmp_path, objective="cost", at_most={"money": 1}), of_pool=(of_pool,)) == []


def test_values_that_are_none_of_now_are_refused(tmp_path):
    write_hours(tmp_path, 1, 2, begins=NOW - timedelta(days=3))
    (found,) = faults(tmp_path, price="prices.csv")
    assert "none of now" in found
    write_hours(tmp_path, 1, 2, begins=NOW + timedelta(days=3))
    assert "none of now" in faults(tmp_path, price="prices.csv")[0]


def test_negative_prices_count_as_0_where_the_batch_says_so(tmp_path):
    write_hours(tmp_path, -5.0, 7.2)
    batch = load(tmp_path, price="prices.csv", negative_prices="as-zero")
    assert tariffs_of(batch).every.price.values == (0.0, 7.2)


def test_devices_that_cost_nothing_have_a_price(tmp_path):
    (node,) = load(tmp_path, objective="cost", price=0).terms.on(problem()).nodes
    assert (node.price, node.price_steps) == (0.0, ((0.0, 0.0),))


def test_where_energy_has_a_price_alone_devices_cost_nothing_else(tmp_path):
    (node,) = load(tmp_path, objective="cost", energy_price=0.3, power_w=300.0).terms.on(problem()).nodes
    assert (node.price, node.price_steps, node.energy_price_steps) == (0.0, (), ((0.0, 0.3),))


def test_a_price_that_does_not_count_beside_those_of_the_pool_is_said(tmp_path):
    batch, of_pool = load(tmp_path, price_per_device_hour=3.0), Tariffs(every=Tariff(price=Series.constant(1.0)))
    (notice,) = placed(batch, may_join=True, of_pool=(of_pool,))
    assert notice.startswith("price_per_device_hour does not count: the pool has prices")
    assert placed(batch, may_join=True, of_pool=(Tariffs(every=Tariff(power_w=9.0)),)) == []
    assert placed(load(tmp_path), may_join=True, of_pool=(of_pool,)) == []


def test_no_plan_waits_for_the_last_step_of_a_series_that_would_last_for_ever():
    cheap_at_night = Series(values=(1.0,) * 6 + (5.0,) * 18, zone="UTC")
    now_s = datetime(2026, 11, 10, 16, tzinfo=UTC).timestamp()  # what counts ends 34 hours later, at night

    def steps(series, runtime_s):
        tariffs = Tariffs(every=Tariff(price=series))
        (node,) = tariffs.on(problem(runtime_s=runtime_s), now_s=now_s, past=lambda: ()).nodes
        return [(at_s / HOUR_S, pytest.approx(value * HOUR_S)) for at_s, value in node.price_steps]

    assert steps(cheap_at_night, 10 * HOUR_S) == [(0, 5.0), (8, 1.0), (14, 5.0), (32, 1.0), (38, 5.0)]
    longest = steps(Series(values=tuple(HOURS), zone="UTC"), 420 * DAY_S)
    assert len(longest) == 10_000 and longest[-1][1] == 23.0  # as many steps as a problem may have


def test_what_waiting_gains_is_planned_without_bounds_and_alone(tmp_path):
    batch = load(tmp_path, objective="cost", price=1.0, at_most={"money": 1e-9})
    assert without_bounds(batch).terms.on(problem()).budgets == {} != batch.terms.on(problem()).budgets
    assert without_bounds(load(tmp_path)) == load(tmp_path)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(with_wait(whatif))
    done = CliRunner().invoke(app, [str(tmp_path / "batch.yaml"), "--wait", "--add-devices", "2", "--explain"])
    assert "--wait answers nothing of --add-devices, --explain" in str(done.exception)


def test_numbers_that_planners_refuse_are_refused_in_the_file(tmp_path):
    (price,) = faults(tmp_path, objective="cost", price=1e300)
    assert price.endswith("price: is 1e+300. To fix: give a number from 0 to 1e+12.")
    (bound,) = faults(tmp_path, objective="cost", price=1.0, at_most={"money": 1e300})
    assert "at_most.money: must be at most 1,000,000,000" in bound
