"""Private names of FSDP2.

AllGather, ReduceScatter: base classes of what `FSDPModule.set_custom_all_gather` and `set_custom_reduce_scatter` take,
which are public, while their classes have no public name. Without them FSDP cannot gather into buffers that stay, nor
add summands in bf16 in fp32, nor in one order.
"""

from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

__all__ = ["AllGather", "ReduceScatter"]
