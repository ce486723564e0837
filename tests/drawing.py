"""The number of examples that Hypothesis draws."""

from hypothesis import settings

EXAMPLES_OF_A_PROFILE = 100  # the default of Hypothesis and of the project's profiles


def draws(number: int) -> settings:
    """Settings that draw `number` examples in `make test`, and ten times as many under the profile `full`."""
    return settings(max_examples=max(1, number * settings().max_examples // EXAMPLES_OF_A_PROFILE))
