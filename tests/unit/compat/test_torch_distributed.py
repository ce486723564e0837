"""The private names of `torch.distributed` and FSDP2 that are used do what is relied on."""

import inspect
import io
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from ringmaster.compat import torch_distributed as compat
from ringmaster.compat.torch_fsdp import AllGather, ReduceScatter


@pytest.fixture
def mesh():
    """Two ranks, of which this process is the second one, and the first one sends nothing."""
    compat.init_fake_group(rank=1, num_ranks=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_a_rank_knows_its_part_of_a_tensor(mesh):
    tensor = distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)], src_data_rank=None)
    assert compat.local_region(tensor) == ((2, 2), (3, 0))
    assert compat.local_region(distribute_tensor(torch.ones(3), mesh, [Replicate()], src_data_rank=None)) == (
        (3,),
        (0,),
    )


@pytest.mark.parametrize("style", [compat.ColwiseStyle, compat.RowwiseStyle])
def test_a_linear_layer_and_its_parts_are_divided_by_the_own_method(mesh, style):
    divided = []

    class Recorded(style):
        def divide(self, name, module, mesh):
            divided.append((name, module, mesh.size()))

    linear = nn.Linear(2, 2)
    linear.part = nn.Linear(2, 2)
    parallelize_module(nn.ModuleDict({"linear": linear}), mesh, {"linear": Recorded()}, src_data_rank=None)
    assert sorted(divided, key=lambda each: each[0]) == [("", linear, 2), ("part", linear.part, 2)]


def test_a_style_of_ones_own_lays_a_module_out(mesh):
    replaced = nn.Identity()

    class Replacing(compat.ModuleStyle):
        def parallelize(self, module, mesh):
            module.was_laid_out = mesh.size()
            return module

    parallelize_module(nn.ModuleDict({"part": replaced}), mesh, {"part": Replacing()}, src_data_rank=None)
    assert replaced.was_laid_out == 2


def test_a_fake_group_has_all_ranks(mesh):
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (1, 2, "fake")
    dist.all_reduce(torch.ones(1))


def test_an_exchange_of_unequal_sizes_is_followed_by_autograd(mesh):
    sent = torch.ones(3, requires_grad=True)
    arrived = compat.all_to_all_single_autograd(sent, [1, 1], [1, 2], mesh.get_group())
    assert arrived.shape == (2,)
    arrived.sum().backward()
    assert sent.grad.shape == (3,)


def test_collectives_ask_what_is_replaced(mesh, monkeypatch):
    asked = []
    place, name, value = compat.replacement_of_tracing(lambda: bool(asked.append(name)))
    assert callable(getattr(place, name))
    monkeypatch.setattr(place, name, value)
    place.wait_tensor(place.all_reduce(torch.ones(1), "sum", mesh))
    assert asked


def test_the_metadata_of_a_checkpoint_names_the_private_classes(tmp_path):
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    named = set()

    class Names(pickle.Unpickler):
        def find_class(self, module, name):
            found = super().find_class(module, name)
            named.add(found)
            return found

    Names(io.BytesIO((tmp_path / ".metadata").read_bytes())).load()
    private = {each for each in named if getattr(each, "__name__", "").startswith("_")}
    from ringmaster.compat.torch import stored_layout

    assert private == {*compat.dcp_metadata_classes(), stored_layout}


@pytest.mark.parametrize(
    ("base", "setter", "options"),
    [
        (AllGather, FSDPModule.set_custom_all_gather, ["async_op"]),
        (ReduceScatter, FSDPModule.set_custom_reduce_scatter, ["op", "async_op"]),
    ],
)
def test_fsdp_takes_collectives_of_these_classes(base, setter, options):
    called = ["output_tensor", "input_tensor", "group", *options]
    assert list(inspect.signature(setter).parameters) == ["self", "comm"]
    assert list(inspect.signature(base.__call__).parameters) == ["self", *called]
    assert list(inspect.signature(base.allocate).parameters) == ["self", "size", "dtype", "device"]
    assert base.__abstractmethods__ == {"allocate", "__call__"}
