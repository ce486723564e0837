"""Durations and numbers of things in words, as messages and pages show them."""

AS_PLANNED = 0.01  # a smaller relative difference is none


def seconds_text(value: float, *, like: float | None = None) -> str:
    """Formats seconds for the user, to three or four digits or hundredths of an hour.

    like: seconds whose unit is used, so that values that are compared have the same unit; by default `value`.
    """
    scale = value if like is None else like
    if scale >= 7200:
        return f"{value / 3600:.2f} h" if value < 360_000 else f"{value / 3600:.0f} h"
    if scale >= 300:
        return f"{value / 60:.1f} min"
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def compared_with_plan(actual: float, planned: float, *, is_whole: bool = True) -> str:
    """Returns how a duration compares with the planned one: "34 % faster than planned".

    is_whole: whether all that was planned was done; what ended before has no comparison.
    """
    if not is_whole:
        return "not all that was planned was done"
    off = actual / planned - 1 if planned else 0.0
    if abs(off) < AS_PLANNED:
        return "as planned"
    if off > 1:
        return f"{actual / planned:.3g} times as long as planned"
    return f"{100 * abs(off):.0f} % {'faster' if off < 0 else 'slower'} than planned"


def practice_text(practice_s: float, *, planned_s: float, are_measured: bool) -> str:
    """Returns how one job after another, each on all devices, compares with the plan, by the same runtimes."""
    of = "measured" if are_measured else "predicted"
    return (
        f"By the same {of} runtimes, one job after another on all devices takes {practice_s:.1f} s, "
        f"{practice_s / planned_s:.2f} times as long as the plan"
    )


def counted(number: int, what: str, several: str = "") -> str:
    """Returns a number of things in words, such as "1 device" or "3 devices".

    several: the word for several of them, where it is not `what` with an s.
    """
    return f"{number} {what if number == 1 else several or what + 's'}"
