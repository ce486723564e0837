"""The number of examples that Hypothesis draws."""

from hypothesis import settings

EXAMPLES_OF_A_PROFILE = 100  # the default of Hypothesis, and that of long tests
MIN_EXAMPLES = 2  # a test that fails for every second example is to fail


def draws(number: int) -> settings:
    """Settings that draw `number` examples in `make test-full`, in `make test` and under each profile in proportion."""
    in_proportion = number * settings().max_examples // EXAMPLES_OF_A_PROFILE
    return settings(max_examples=max(min(number, MIN_EXAMPLES), in_proportion))
