"""Worker targets of gangs on one GPU: several ranks that share it by gloo, or one rank that communicates by NCCL."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ringmaster.techniques.processes import ranks, worker


def main(channel, argument):
    """Runs one rank as `worker.main` does; NCCL refuses two ranks on one GPU, so that tensors go through gloo."""
    ranks.BACKENDS["cuda"] = "gloo"
    worker.main(channel, argument)


def main_of_one(channel, argument):
    """Runs the only rank of a gang, with a process group and a mesh, which a single rank has no need of otherwise."""
    worker.join = join_group_of_one
    worker.main(channel, argument)


def join_group_of_one(order, rank, *, num_ranks, axes):
    assert num_ranks == 1, "one rank on each GPU"
    device = ranks.take_device(order.slots, rank, num_ranks=1)
    dist.init_process_group(backend=ranks.BACKENDS[device.type], store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    return ranks.RankContext(rank=0, num_ranks=1, device=device, mesh=mesh)
