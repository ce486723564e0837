"""Errors that keep a process from working with a pool at all."""

from ringmaster.model_lineage.faults import RingmasterError


class OtherRelease(RingmasterError, ValueError):
    """Raised for a database or a pool of another release of Ringmaster; nothing was started."""

    @property
    def faults(self) -> tuple[str, ...]:
        """The messages that are shown to a person."""
        return (str(self),)
