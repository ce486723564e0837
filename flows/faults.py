"""Faults in what a person gave us, found before anything starts."""

from collections.abc import Sequence

from tasks.messages import listed


class InputError(ValueError):
    """The user's input cannot be worked with; nothing was started. `faults` are all that is wrong."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__(listed(self.faults))
