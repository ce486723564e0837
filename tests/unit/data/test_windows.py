"""Windows of a data set's rows, by time and by number."""

from itertools import compress

import numpy as np
import pytest

from ringmaster.techniques.data.file_rows import DAY_S, moment, rows_in_window

ROWS = [float(day) * DAY_S for day in (3, 1, 9, 8, 4)]


@pytest.mark.parametrize(
    ("window", "days"),
    [
        (None, [3, 1, 9, 8, 4]),
        ({"last_rows": 2}, [8, 4]),
        ({"last_rows": 99}, [3, 1, 9, 8, 4]),
        ({"last_days": 1}, [9, 8]),
        ({"last_days": 5}, [9, 8, 4]),
        ({"since": "1970-01-05"}, [9, 8, 4]),
        ({"until": "1970-01-05"}, [3, 1]),
        ({"since": 3 * DAY_S, "until": "1970-01-09T00:00:00+00:00"}, [3, 4]),
        ({"since": "2030-01-01"}, []),
    ],
)
def test_a_window_keeps_the_order_of_rows(window, days):
    wanted = rows_in_window([np.array(ROWS[:2]), np.array([]), np.array(ROWS[2:])], window)
    assert [row / DAY_S for row in compress(ROWS, np.concatenate(wanted))] == days


def test_days_count_back_from_the_newest_row_whatever_the_day_is_today():
    later = [row + 1000 * DAY_S for row in ROWS]
    wanted = rows_in_window([np.array(later)], {"last_days": 1})
    assert [row / DAY_S for row in compress(later, *wanted)] == [1009, 1008]


@pytest.mark.parametrize("window", [None, {"last_rows": 2}, {"last_days": 1}])
def test_a_window_of_no_parts_has_none(window):
    assert rows_in_window([], window) == []


@pytest.mark.parametrize(("said", "seconds"), [(5, 5.0), ("1970-01-02", DAY_S), ("1970-01-01T01:00:00+01:00", 0.0)])
def test_moments(said, seconds):
    assert moment(said) == seconds


@pytest.mark.parametrize("text", ["19700102", "20260131", "20240229"])
def test_a_number_of_eight_digits_is_the_date_that_its_text_is(text):
    assert moment(int(text)) == moment(float(text)) == moment(text)
    assert moment(1_780_000_000) == 1_780_000_000.0


@pytest.mark.parametrize("said", [True, None, "soon", [], 20230229, 20230229.0, float("nan"), float("inf")])
def test_what_is_no_moment(said):
    with pytest.raises(ValueError, match="is not a valid time"):
        moment(said)
