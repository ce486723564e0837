"""Faults in what a person gave us, found before anything starts."""

from collections.abc import Sequence


class InputError(ValueError):
    """The user's input cannot be worked with; nothing was started. `faults` are told all at once."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(faults))
