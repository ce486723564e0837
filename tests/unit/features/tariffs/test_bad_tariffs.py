"""Bad tariffs, and odd ones that are valid: refused with their lines, all at once, however a series is given."""

from datetime import UTC, datetime, timedelta

import pytest

from ringmaster.errors import BatchFileError, ProblemError
from ringmaster.features.tariffs.pool_tariff import load_tariff
from ringmaster.features.tariffs.series import DAY_S, Series
from ringmaster.features.tariffs.terms import MAX_STEPS, _steps
from ringmaster.tasks.planning import Problem
from tests.unit.features.tariffs.test_keys import faults as faults_of_batch

NOW = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
FIRST, SECOND, THIRD, FIFTH = ((NOW + timedelta(hours=hours)).isoformat() for hours in (0, 1, 2, 4))
LOCAL = f"{NOW:%Y-%m-%dT%H:%M}"
HOURS_AND_ONE = [float(hour) for hour in range(25)]


def tariff(folder, text):
    (folder / "tariff.yaml").write_text(text)
    return load_tariff(folder / "tariff.yaml")


def faults(folder, text):
    with pytest.raises(BatchFileError) as caught:
        tariff(folder, text)
    return [str(fault).removeprefix("tariff.yaml:") for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ("", ["line 1: the columns are []"]),
        ("time;value\n", ["line 1: the columns are ['time;value']"]),
        (f"{FIRST},1\n", ["line 1: the columns are"]),
        ("time,value\n", ["line 1: is followed by less than two rows"]),
        (f"time,value\n{FIRST},0,3\n{SECOND},0,4\n", ["line 2: has 3 values", "line 3: has 3 values"]),
        (f"time,value\n{FIRST},1 EUR\n{SECOND},\n", ["line 2: '1 EUR' is not a number", "line 3: '' is not a number"]),
        (
            f"time,value\n{FIRST},NaN\n{SECOND},-inf\n{THIRD},1e999\n",
            ["line 2: NaN is not a finite", "line 3: -inf is not", "line 4: 1e999 is not"],
        ),
        (f"time,value\n{FIRST},-1\n{SECOND},2\n", ["line 2: -1 is negative", "or negative_prices: as-zero"]),
        (f"time,value\n{FIRST},1\n{FIRST},2\n{SECOND},2\n", ["line 3: has the time of line 2"]),
        ("time,value\n2026-11-30T10:00+01:00,1\n2026-11-30T09:00Z,2\n", ["line 3: has the time of line 2"]),
        (f"time,value\n{SECOND},1\n{FIRST},2\n{THIRD},1\n", ["line 3: is earlier than line 2"]),
        (f"time,value\n{FIRST},1\n{SECOND},2\n{THIRD},3\n{FIFTH},4\n", ["line 5: comes 7200 s after", "missing"]),
        (f"time,value\n{FIRST},1\n{LOCAL},2\n", [f"line 3: {LOCAL} has no time zone. Add it, as in 2026-01-31T14:00+"]),
        ("time,value\n2026-11-30,1\n", ["line 2: 2026-11-30 has no time zone. Add it, as in 2026-01-31T14:00+01:00"]),
        ("time,value\n1764489600,1\n30.11.2026 09:00,1\n", ["line 2: '1764489600' is not a time", "line 3: '30.11."]),
        ("time,value\n2026-11-30T09:00:00.5Z,1\n", ["line 2: 2026-11-30T09:00:00.5Z has a fraction of a second"]),
        ("time,value\n2020-01-01T00:00Z,1\n2020-01-01T01:00Z,1\n", ["2020-01-01T02:00+00:00, and none of now"]),
        ("time,value\n2900-01-01T00:00Z,1\n2900-01-01T01:00Z,1\n", ["and none of now. To fix: give values from now"]),
    ],
)
def test_bad_files_are_refused_with_their_lines_alike_for_pools_and_batches(rows, parts, tmp_path):
    (tmp_path / "prices.csv").write_text(rows)
    (of_pool,) = faults(tmp_path, "energy_price: prices.csv")
    (of_batch,) = faults_of_batch(tmp_path, energy_price="prices.csv")
    (of_node,) = faults_of_batch(tmp_path, tariffs={"n1": {"price": "prices.csv"}})
    for text in (of_pool, of_batch, of_node):
        assert all(part in text for part in parts)
        assert text.partition("price: ")[2] == of_pool.partition("price: ")[2]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["1: is empty. To fix: give keys with values, as `key: value`"]),
        ("time,value", ["1: must be a mapping at the top. To fix: give keys"]),
        ("price:", ["1: it says nothing"]),
        ("price: 0.31 EUR", ["1: price: there is no file '0.31 EUR'", "a number has neither quotes nor a unit"]),
        ("price: /dev/zero", ["1: price: there is no file '/dev/zero'"]),
        ("price: []", ["1: price: has 0 of 24 values"]),
        (f"price: {HOURS_AND_ONE}\ntime_zone: UTC", ["1: price: has 25 of 24 values"]),
        (f"price: {HOURS_AND_ONE[:24]}", ["1: price: has the hours of a day in no zone"]),
        (f"price: {HOURS_AND_ONE[:24]}\ntime_zone: UTC+1", ["2: time_zone: 'UTC+1' is not a time zone"]),
        ("price: .nan", ["1: price: is nan. To fix: give a number from 0"]),
        ("price: 1e400", ["1: price: is inf"]),
        (f"price: 1{400 * '0'}", ["1: price: is a number of more than 300 digits"]),
        ("price: 1\nprice: 2", ["2: price: occurs twice, first in line 1"]),
        ("price: 1\nnegative_prices: yes", ["2: negative_prices: 'yes' is unknown"]),
        ("price: 1\nunits: EUR", ["2: units: is an unknown key"]),
        ("price: true\npower_w: 300 W", ["1: price: must be a number, got true", "2: power_w: must be a number"]),
        ("tariffs: {'': {price: 1}}", ["is not a name that a node can have"]),
        ("tariffs: {n1: 0.4}", ["1: tariffs.n1: must be a mapping, got 0.4"]),
        ("tariffs: {n1: {until: 1900000000}}", ["1: tariffs.n1.until: must be text"]),
        ("tariffs: {n1: {until: 2030-01-01}}", ["1: tariffs.n1.until: 2030-01-01 has no time zone"]),
        (
            "tariffs: {n1: {until: 0001-01-01T00:00}}\ntime_zone: Europe/Berlin",
            ["1: tariffs.n1.until: 0001-01-01T00:00 is in the first or the last year"],
        ),
        (
            "tariffs: {n1: {until: 2027-03-28T02:30}}\ntime_zone: Europe/Berlin",
            ["until: clocks in Europe/Berlin do not show 2027-03-28T02:30, as they are put forward"],
        ),
    ],
)
def test_bad_tariffs_are_refused_with_a_fault_for_each_place(text, parts, tmp_path):
    found = faults(tmp_path, text)
    places = [fault.split(": ")[1] for fault in found]
    assert len(set(places)) == len(places)
    assert all(part in "\n".join(found) for part in parts)


def test_odd_tariffs_that_are_valid_are_read(tmp_path):
    (tmp_path / "odd.csv").write_text(f'\ufefftime , value\r\n"{FIRST}", -3 \r\n\r\n{SECOND},1e3\r\n')
    read = tariff(tmp_path, "price: odd.csv\nnegative_prices: as-zero\ntariffs: {1: {until: 2030-01-01T00:00Z}}")
    assert read.every.price.values == (0.0, 1000.0) and read.of("1").until_s == 1893456000.0
    (tmp_path / "days.csv").write_text(f"time,value\n{NOW:%Y-%m-%d},1\n{NOW + timedelta(days=1):%Y-%m-%d},2\n")
    assert tariff(tmp_path, "carbon: days.csv\ntime_zone: Asia/Kathmandu").every.carbon.values == (1.0, 2.0)


def test_an_empty_series_of_a_problem_is_refused():
    with pytest.raises(ProblemError) as caught:
        Problem.from_json(
            {
                "name": "p",
                "nodes": [{"id": "n", "gpus": 1, "prices": [], "carbon": []}],
                "jobs": [{"id": "a", "options": [{"technique": "t", "gpus": 1, "runtime": 1.0}]}],
            }
        )
    assert [fault.partition(" is empty")[0] for fault in caught.value.faults] == ["node 0: prices", "node 0: carbon"]


def test_a_series_of_seconds_over_a_year_is_as_many_steps_as_a_problem_may_have():
    values = tuple(float(k % 5) for k in range(14_000))
    times_s = tuple(1.8e9 + 7.0 * k for k in range(len(values)))
    series = Series(values=values, times_s=times_s, ends_s=times_s[-1] + 7.0)
    steps = _steps(series, now_s=1.8e9, horizon_s=400 * DAY_S)
    assert len(steps) == MAX_STEPS and steps[-1][1] == 4.0
