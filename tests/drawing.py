"""How many examples Hypothesis draws."""

from hypothesis import settings

EXAMPLES_OF_A_PROFILE = 100  # what Hypothesis and our profiles draw where nothing is said


def draws(number: int) -> settings:
    """So many examples in `make test`; under the profile `full` ten times as many."""
    return settings(max_examples=max(1, number * settings().max_examples // EXAMPLES_OF_A_PROFILE))
