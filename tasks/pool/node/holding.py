"""Leases of a machine's devices to its pool worker, so that runs with an executor of their own wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringmaster.errors import NodeAlreadyServed
from ringmaster.tasks.execution.local.leases import Leases

LOOK_EVERY_S = 1.0
WORKER = "worker "


def hold_devices(
    leases: Leases,
    devices: Sequence[str],
    *,
    worker: str,
    may_share: bool,
    notice: Callable[[str], None],
    wait: Callable[[float], object],
) -> None:
    """Leases `devices` to the worker with that name until this process ends; waits while others have any of them.

    may_share: whether devices that other workers have may be used too, without a lease; for the CPU slots of a machine
        that runs several nodes.
    wait: sleeps that many seconds.

    Raises NodeAlreadyServed.
    """
    told = ""
    while not leases.take(devices, holder=WORKER + worker):
        holders = {holder for device, holder in leases.held().items() if device in devices}
        if WORKER + worker in holders:
            raise NodeAlreadyServed(
                f"worker {worker} serves this machine already. To fix: end it, or choose another --name"
            )
        if may_share and holders and all(holder.startswith(WORKER) for holder in holders):
            notice(f"devices are shared with {', '.join(sorted(holders))}")
            return
        if (waited_for := ", ".join(sorted(holders))) not in ("", told):
            told = waited_for
            notice(f"waiting for devices that are held by {waited_for}")
        wait(LOOK_EVERY_S)
