"""A node's worker holds its machine's devices, so that runs which bring their own executor wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringmaster.model_lineage.faults import RingmasterError
from ringmaster.tasks.execution.leases import Leases

LOOK_EVERY_S = 1.0
WORKER = "worker "


class AlreadyServed(RingmasterError, ValueError):
    """A worker of the same name serves this machine."""


def hold_devices(
    leases: Leases,
    devices: Sequence[str],
    *,
    worker: str,
    may_share: bool,
    notice: Callable[[str], None],
    wait: Callable[[float], object],
) -> None:
    """Leases `devices` to the worker of that name until this process ends; waits while somebody else has any of them.

    may_share: whether devices that other workers have may be used, too, without a lease: CPU slots of a machine that
    plays several nodes. wait: sleeps so many seconds. Raises AlreadyServed.
    """
    told = ""
    while not leases.take(devices, holder=WORKER + worker):
        holders = {holder for device, holder in leases.held().items() if device in devices}
        if WORKER + worker in holders:
            raise AlreadyServed(
                f"worker {worker} serves this machine already. To fix: end it, or choose another --name"
            )
        if may_share and holders and all(holder.startswith(WORKER) for holder in holders):
            notice(f"devices are shared with {', '.join(sorted(holders))}")
            return
        if (waited_for := ", ".join(sorted(holders))) not in ("", told):
            told = waited_for
            notice(f"waiting for devices that are held by {waited_for}")
        wait(LOOK_EVERY_S)
