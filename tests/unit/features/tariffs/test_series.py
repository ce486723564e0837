"""Values over time: hours of days of any length, files, and all that can be wrong with their lines."""

import json
import math
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster.codec import from_json, to_json
from ringmaster.features.tariffs.series import DAY_S, HOUR_S, Series, read_series

BERLIN = ZoneInfo("Europe/Berlin")
OF_HOURS = Series(values=tuple(map(float, range(24))), zone="Europe/Berlin")


def at(text, zone=BERLIN):
    return datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()


def read(tmp_path, *lines, zone="", allows_negative=False, head="time,value"):
    file = tmp_path / "values.csv"
    file.write_text("\n".join([head, *lines]))
    return read_series(file, zone=zone, allows_negative=allows_negative)


@pytest.mark.parametrize(
    ("day", "hours", "num_hours"),
    [
        ("2026-11-29", list(range(24)), 24),
        ("2026-03-29", [0, 1, *range(3, 24)], 23),  # clocks are put forward from 2 to 3
        ("2026-10-25", [0, 1, 2, *range(3, 24)], 25),  # and put back from 3 to 2: two hours of one number
    ],
)
def test_a_day_has_as_many_hours_as_its_clocks_show(day, hours, num_hours):
    begins_s = at(f"{day}T00:00")
    day_s = num_hours * HOUR_S
    steps = OF_HOURS.steps(begins_s, horizon_s=day_s)
    assert [value for _, value in steps] == hours
    assert steps[-1][0] == day_s - HOUR_S
    assert OF_HOURS.integral(begins_s, begins_s + day_s) == HOUR_S * sum(
        OF_HOURS.value_at(begins_s + k * HOUR_S) for k in range(num_hours)
    )


def test_steps_begin_within_an_hour_and_join_equal_values():
    from_s = at("2026-11-29T10:40")
    assert OF_HOURS.steps(from_s, horizon_s=2 * HOUR_S) == ((0.0, 10.0), (1200.0, 11.0), (4800.0, 12.0))
    same = Series(values=(2.0,) * 24, zone="Asia/Kathmandu")
    assert same.steps(from_s, horizon_s=DAY_S) == ((0.0, 2.0),)
    assert Series.constant(3.0).steps(from_s, horizon_s=math.inf) == ((0.0, 3.0),)


def test_hours_of_a_zone_with_quarters_begin_by_its_clocks():
    kathmandu = Series(values=OF_HOURS.values, zone="Asia/Kathmandu")  # UTC+5:45
    noon_s = at("2026-11-29T12:00", ZoneInfo("UTC"))
    assert kathmandu.steps(noon_s, horizon_s=HOUR_S) == ((0.0, 17.0), (900.0, 18.0))


def test_a_file_holds_each_value_until_the_next(tmp_path):
    series = read(tmp_path, "2026-11-29T10:00Z,1", "2026-11-29T10:15Z,2", "2026-11-29T12:30+02:00,3").series
    begins_s = at("2026-11-29T10:00", ZoneInfo("UTC"))
    assert series.steps(begins_s, horizon_s=HOUR_S) == ((0.0, 1.0), (900.0, 2.0), (1800.0, 3.0))
    assert series.steps(begins_s + 1000.0, horizon_s=HOUR_S) == ((0.0, 2.0), (800.0, 3.0))
    assert series.ends_s == begins_s + 45 * 60
    assert series.integral(begins_s, begins_s + 2000.0) == 900.0 + 1800.0 + 600.0


def test_clocks_that_show_an_hour_twice_are_read_in_order(tmp_path):
    lines = ["2026-10-25T01:00,1", "2026-10-25T02:00,2", "2026-10-25T02:00,3", "2026-10-25T03:00,4"]
    series = read(tmp_path, *lines, zone="Europe/Berlin").series
    assert [b - a for a, b in zip(series.times_s, series.times_s[1:], strict=False)] == [HOUR_S] * 3


def test_after_its_end_the_last_day_of_a_file_is_repeated_by_its_clocks(tmp_path):
    begins_s = at("2026-03-28T00:00")  # the next day has 23 hours
    lines = [f"2026-03-28T{hour:02}:00,{hour}" for hour in range(24)]
    series = read(tmp_path, *lines, zone="Europe/Berlin").series
    steps = series.steps(begins_s, horizon_s=2 * DAY_S)
    values = [series.value_at(begins_s + k * HOUR_S) for k in range(48)]
    assert values == [*range(24), 0, 1, *range(3, 24), 0]
    assert [value for _, value in steps] == values
    late_s = at("2026-04-05T17:30")
    assert series.value_at(late_s) == 17 and series.steps(late_s, horizon_s=HOUR_S)[1] == (1800.0, 18.0)


def test_after_the_end_of_less_than_a_day_the_last_value_lasts(tmp_path):
    series = read(tmp_path, "2026-11-29T10:00Z,1", "2026-11-29T11:00Z,2").series
    assert series.value_at(series.ends_s + 100 * DAY_S) == 2.0
    assert series.steps(series.ends_s, horizon_s=DAY_S) == ((0.0, 2.0),)


def test_every_fault_of_a_file_is_named_with_its_line(tmp_path):
    lines = [
        "2026-11-29T10:00Z,1",
        "2026-11-29T11:00,2",  # line 3
        "2026-11-29T12:00Z,nan",
        "2026-11-29T13:00Z,-4",
        "2026-11-29T14:00Z,much",
        "tomorrow,6",
        "2026-11-29T16:00Z",
        "2026-11-29T17:00Z,1",
        "2026-11-29T17:00Z,1",
        "",
        "2026-11-29T16:30Z,1",
        "2026-11-29T17:30Z,inf",
    ]
    found = read(tmp_path, *lines)
    assert found.series is None
    assert [fault.split(":")[0] for fault in found.faults] == [f"line {k}" for k in (3, 4, 5, 6, 7, 8, 10, 12, 13)]
    text = "\n".join(found.faults)
    for part in ("no time zone", "nan is not a finite", "-4 is negative", "'much' is not a number", "not a time"):
        assert part in text
    assert "line 10: has the time of line 9" in text and "line 12: is earlier than line 10" in text


@pytest.mark.parametrize("every_h", [4, 24])
def test_days_of_a_zone_have_no_hole_where_its_clocks_are_put_forward_or_back(tmp_path, every_h):
    for month, last in ((3, 31), (10, 31)):
        times = [f"2026-{month:02}-{day:02}T{hour:02}:00" for day in range(20, last) for hour in range(0, 24, every_h)]
        series = read(tmp_path, *(f"{time},{k}" for k, time in enumerate(times)), zone="Europe/Berlin").series
        assert series.value_at(at(f"2026-{month}-30T05:00".replace("-3-", "-03-"))) == times.index(
            max(time for time in times if time <= f"2026-{month:02}-30T05:00")
        )
        assert series.ends_s - series.times_s[-1] == every_h * HOUR_S
        fault = "rows are missing"
        assert fault in read(tmp_path, *(f"{time},1" for time in times if "-26T00" not in time), zone="UTC").faults[0]


def test_a_hole_is_named(tmp_path):
    found = read(tmp_path, "2026-11-29T10:00Z,1", "2026-11-29T11:00Z,2", "2026-11-29T13:00Z,3")
    assert found.faults == ("line 4: comes 7200 s after line 3, and others 3600 s: rows are missing",)


def test_a_time_that_clocks_skip_is_named(tmp_path):
    found = read(tmp_path, "2026-03-29T01:00,1", "2026-03-29T02:00,2", zone="Europe/Berlin")
    assert found.faults == ("line 3: clocks in Europe/Berlin do not show 2026-03-29T02:00, as they are put forward",)


def test_other_columns_and_a_single_row_are_refused(tmp_path):
    assert "must be time,value" in read(tmp_path, "1,2", head="hour,price").faults[0]
    assert "less than two rows" in read(tmp_path, "2026-11-29T10:00Z,1").faults[0]


def test_negative_values_count_as_0_where_that_is_allowed(tmp_path):
    lines = "2026-11-29T10:00Z,-1", "2026-11-29T11:00Z,2"
    assert read(tmp_path, *lines, allows_negative=True).series.values == (0.0, 2.0)


@given(st.integers(0, 400 * 24 * 60), st.integers(1, 3 * 24 * 60), st.booleans())
def test_the_steps_and_the_integral_agree_with_the_value_at_each_moment(minute, num_minutes, is_file):
    from_s = at("2026-01-01T00:00") + 60.0 * minute
    times_s = tuple(at("2026-03-28T00:00") + k * HOUR_S for k in range(30))
    of_file = Series(
        values=tuple(map(float, range(30))), times_s=times_s, ends_s=times_s[-1] + HOUR_S, zone="Europe/Berlin"
    )
    series, to_s = of_file if is_file else OF_HOURS, from_s + 60.0 * num_minutes
    steps = series.steps(from_s, horizon_s=to_s - from_s)
    bounds = [*(start_s for start_s, _ in steps), to_s - from_s]
    for (start_s, value), end_s in zip(steps, bounds[1:], strict=True):
        for moment_s in (start_s, (start_s + end_s) / 2):
            assert series.value_at(from_s + moment_s) == value
    total = sum(value * (end_s - start_s) for (start_s, value), end_s in zip(steps, bounds[1:], strict=True))
    assert math.isclose(series.integral(from_s, to_s), total, abs_tol=1e-3)


@pytest.mark.parametrize("series", [Series.constant(2.0), OF_HOURS], ids=["constant", "hours"])
def test_the_stored_form_has_no_infinite_number_which_databases_refuse(series):
    stored = json.dumps(to_json(series), allow_nan=False)
    assert from_json(Series, json.loads(stored)) == series


@pytest.mark.parametrize("every_h", [1, 4, 7])
def test_the_repeated_last_day_changes_when_its_values_do_though_clocks_are_put_back(every_h):
    begins_s, every_s = at("2026-10-23T00:00"), every_h * HOUR_S
    number = 2 * math.ceil(24 / every_h)
    series = Series(
        values=tuple(map(float, range(number))),
        times_s=tuple(begins_s + k * every_s for k in range(number)),
        ends_s=begins_s + number * every_s,
        zone="Europe/Berlin",
    )
    steps = series.steps(begins_s, horizon_s=9 * DAY_S)
    for quarter in range(9 * 96):
        value = next(value for at_s, value in reversed(steps) if at_s <= quarter * 900.0)
        assert value == series.value_at(begins_s + quarter * 900.0)


@pytest.mark.parametrize("text", ["\ufefftime,value\n{}\n{}\n", "time,value\r{}\r{}\r", "time,value\r\n{}\r\n{}\r\n"])
def test_files_of_spreadsheets_are_read(tmp_path, text):
    (tmp_path / "values.csv").write_bytes(text.format("2026-01-31T14:00Z,1", "2026-01-31T15:00Z,2").encode())
    read_file = read_series(tmp_path / "values.csv", zone="", allows_negative=False)
    assert read_file.series is not None and read_file.series.values == (1.0, 2.0)


def test_values_are_those_that_planners_tell_apart(tmp_path):
    assert read(tmp_path, "2026-01-31T14:00Z,1e300").faults[0] == "line 2: 1e300 is larger than 1e+12"
    series = read(tmp_path, "2026-01-31T14:00Z,1e-300", "2026-01-31T15:00Z,2").series
    assert series is not None and series.values == (0.0, 2.0)


def test_what_is_no_csv_or_before_all_time_is_refused(tmp_path):
    with pytest.raises(ValueError, match="line 2: field larger"):
        read(tmp_path, "9" * 2000 + ",1")
    faults = read(tmp_path, "0001-01-01T00:00,1", zone="Europe/Berlin").faults
    assert faults[0].startswith("line 2: ")
