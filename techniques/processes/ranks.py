"""One rank of a gang: its device, its peers, and the collective calls between them."""

import os
import resource
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringmaster.techniques.processes.order import GangOrder, Slot, rendezvous

LOOPBACK = "lo"


def meet(meeting: str, rank: int, *, num_ranks: int, timeout: timedelta) -> TCPStore:
    """Returns the store at `meeting`, "host:port"; rank 0 serves it at that address of its machine only.

    Gloo and NCCL are set to use the network interface that leads to it, unless the environment names another one.
    Raises OSError where rank 0 cannot listen there, ValueError where no interface leads there.
    """
    host, port = split_address(meeting)
    interface = interface_towards(host, port)
    if os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK) == LOOPBACK:  # the fork server's default, for one machine
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    listener = None
    if rank == 0:
        # By default the store would listen on all addresses, and accept connections from any other machine.
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family).detach()
    return TCPStore(
        host,
        port,
        num_ranks,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of "host:port" or "[host]:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def interface_towards(host: str, port: int) -> str:
    """Returns the name of the network interface by which this machine reaches a host."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing; the kernel only selects the source address
        address = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if address in [each.address.partition("%")[0] for each in addresses]:
            return str(name)
    raise ValueError(
        f"no network interface has the address {address}, from which {host} is reached. To fix: name the one that "
        "leads there in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    )


BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""The backend of collective calls by type of device; sums of losses are exchanged on the CPU."""


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """One rank of a gang: its device, the device mesh, and collective calls over all ranks.

    device: where its tensors are.
    mesh: the gang's devices; None for a single process.
    first_bytes: what the process held when it joined: Python and libraries, which all ranks of a machine share.
    """

    rank: int
    num_ranks: int
    device: torch.device
    mesh: DeviceMesh | None
    first_bytes: int = 0

    def sum(self, values: list[float]) -> list[float]:
        """Returns the element-wise sum over all ranks."""
        if self.num_ranks == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        summed: list[float] = total.tolist()
        return summed

    def gather(self, values: Sequence[Tensor]) -> list[list[Tensor]]:
        """Returns each of `values` of every rank, in the order of the ranks.

        values: vectors in fp64 on the CPU, equally many on all ranks, of any lengths.
        """
        if self.num_ranks == 1:
            return [[value] for value in values]
        lengths = torch.zeros(self.num_ranks, len(values), dtype=torch.int64)
        lengths[self.rank] = torch.tensor([len(value) for value in values])
        dist.all_reduce(lengths)
        own = torch.zeros(int(lengths.sum(1).max()), dtype=torch.float64)
        own[: int(lengths[self.rank].sum())] = torch.cat(list(values))
        every = [torch.empty_like(own) for _ in range(self.num_ranks)]
        dist.all_gather(every, own)
        by_rank = [torch.split(each[: sum(sizes)], sizes) for each, sizes in zip(every, lengths.tolist(), strict=True)]
        return [[parts[i] for parts in by_rank] for i in range(len(values))]

    def max(self, value: float) -> float:
        """Returns the largest of the ranks' values."""
        if self.num_ranks == 1:
            return value
        largest = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest)

    def peak_bytes(self) -> int:
        """Returns the most bytes that this rank has held: of a GPU's allocator, or of a CPU rank's process.

        What the process held before it joined does not count, as it does not in predictions.
        """
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return max(0, _held_bytes() - self.first_bytes)

    def agree(self, yes: bool) -> bool:
        """Returns whether all ranks pass True; it is also a barrier."""
        return self.sum([float(not yes)])[0] == 0


def _held_bytes() -> int:
    """Returns the most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def alone(device: torch.device) -> RankContext:
    """Returns the `RankContext` of a process without peers."""
    return RankContext(rank=0, num_ranks=1, device=device, mesh=None, first_bytes=_held_bytes())


def show_gpus(slots: tuple[Slot, ...]) -> None:
    """Lets CUDA see the GPUs of these slots alone; to be called before CUDA is used.

    A process without a GPU must see none: each step of an optimizer queries CUDA whether a graph is being captured,
    also for tensors on the CPU, which opens a context on a GPU.
    """
    gpus = [slot.uuid or str(slot.index) for slot in slots if slot.kind == "gpu"]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)


def take_device(slots: tuple[Slot, ...], rank: int, *, num_ranks: int) -> torch.device:
    """Binds this process to its slots, before it uses a device: a GPU, or cores with one thread each."""
    own_slots = slots if num_ranks == 1 else (slots[rank],)
    cores = sorted({core for slot in own_slots for core in slot.cores})
    if cores:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(max(len(cores), 1))
    show_gpus(own_slots[:1])
    if own_slots[0].kind == "gpu":
        torch.cuda.set_device(0)
        torch.backends.cudnn.allow_tf32 = False  # else convolutions of fp32 round to 10 bits, as products do not
        return torch.device("cuda", 0)
    return torch.device("cpu")


def join(order: GangOrder, rank: int, *, num_ranks: int, axes: Mapping[str, int]) -> RankContext:
    """Connects to the other ranks and builds the device mesh over them.

    The ranks meet through a file in the gang's folder, or at an address where they are on several machines.
    """
    device = take_device(order.slots, rank - order.first_rank, num_ranks=num_ranks)
    if num_ranks == 1:
        return alone(device)
    timeout = timedelta(seconds=order.collective_timeout_s)
    store: Store = (
        meet(order.meeting, rank, num_ranks=num_ranks, timeout=timeout)
        if order.meeting
        else FileStore(str(rendezvous(order)), num_ranks)
    )
    dist.init_process_group(
        backend=BACKENDS[device.type],
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
    )
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    return RankContext(rank=rank, num_ranks=num_ranks, device=device, mesh=mesh, first_bytes=_held_bytes())
