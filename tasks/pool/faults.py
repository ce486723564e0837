"""What keeps a process from working with a pool at all."""

from ringmaster.model_lineage.faults import RingmasterError


class OtherRelease(RingmasterError, ValueError):
    """A database or a pool is of another release of Ringmaster; nothing was started."""

    @property
    def faults(self) -> tuple[str, ...]:
        """What is told to a person."""
        return (str(self),)
