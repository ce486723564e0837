"""The private names of PyTorch that `ringmaster.compat.torch` gives do what is relied on."""

import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from ringmaster.compat import torch as compat


def test_fake_tensors_have_shapes_and_no_values():
    with compat.FakeTensorMode(allow_non_fake_inputs=True):
        product = torch.ones(2, 3) @ torch.ones(3, 4)
        with compat.unset_fake_temporarily():
            real = torch.ones(1)
    assert isinstance(product, compat.FakeTensor)
    assert product.shape == (2, 4)
    assert type(real) is torch.Tensor


class Operators(compat.TorchDispatchMode):
    """Collects the operators that run, and answers those that read a value."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return 7.0 if func is compat.READ_VALUE else func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_operators_and_may_answer_for_them():
    with Operators() as operators:
        value = torch.ones(1).item()
    assert value == 7.0
    assert compat.READ_VALUE in operators.seen


def test_an_operator_says_whether_it_writes_into_its_arguments():
    assert compat.is_mutable(torch.ops.aten.add_.Tensor)
    assert not compat.is_mutable(torch.ops.aten.add.Tensor)


def test_plain_tensors_are_no_wrappers():
    assert not compat.is_wrapper(torch.ones(1))
    assert not compat.is_wrapper(nn.Parameter(torch.ones(1)))
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    assert compat.is_wrapper(nested)


def test_trees_are_taken_apart_and_put_together_again():
    tree = {"a": [1, 2], "b": (3,)}
    leaves, spec = compat.tree_flatten(tree)
    assert leaves == compat.tree_leaves(tree) == [1, 2, 3]
    assert compat.tree_unflatten([10, 20, 30], spec) == {"a": [10, 20], "b": (30,)}


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_storage_has_one_key_for_all_its_views(mode):
    with compat.FakeTensorMode() if mode == "fake" else torch.device("cpu"):
        one, other = torch.ones(4), torch.ones(4)
    key = compat.storage_key(one.untyped_storage())
    assert key == compat.storage_key(one[1:].untyped_storage())
    assert key != compat.storage_key(other.untyped_storage())


def test_references_to_a_storage_are_counted():
    tensor = torch.ones(4)
    alone = compat.num_storage_references(tensor)
    view = tensor[1:]
    assert compat.num_storage_references(tensor) > alone
    del view
    assert compat.num_storage_references(tensor) == alone


def test_views_are_known():
    tensor = torch.ones(4)
    assert not compat.is_view(tensor)
    assert compat.is_view(tensor[1:])


def test_a_parameter_may_be_replaced_by_a_tensor():
    linear = nn.Linear(2, 2, bias=False)
    assert [*compat.own_parameters(linear)] == ["weight", "bias"]
    compat.own_parameters(linear)["weight"] = torch.eye(2) * 3
    assert linear(torch.ones(2)).tolist() == [3.0, 3.0]
    compat.set_own_parameters(linear, {"weight": torch.eye(2) * 4, "bias": None})
    assert linear(torch.ones(2)).tolist() == [4.0, 4.0]


def test_a_buffer_is_replaced_and_stays_out_of_checkpoints():
    module = nn.Module()
    module.register_buffer("stored", torch.ones(1))
    module.register_buffer("made", torch.ones(1), persistent=False)
    compat.own_buffers(module)["made"] = torch.zeros(1)
    assert module.made.item() == 0.0
    assert [name for name, _ in compat.persistent_buffers(module)] == ["stored"] == [*module.state_dict()]


def test_submodules_that_are_none_have_a_name():
    module = nn.Module()
    module.part = nn.Identity()
    module.part = None
    assert [*compat.own_modules(module)] == ["part"]


def test_hooks_of_a_module_are_listed():
    module, hook = nn.Identity(), lambda *_: None
    module.register_forward_pre_hook(hook)
    assert compat.forward_pre_hooks(module) == [hook]


def test_operators_on_lists_compute_in_place():
    tensors, others = [torch.tensor([2.0])], [torch.tensor([3.0])]
    product = compat.foreach_mul(tensors, 2.0)
    compat.foreach_add_(product, others, alpha=-2.0)
    compat.foreach_mul_(product, 5.0)
    assert product[0].item() == -10.0
    compat.foreach_neg_(product)
    compat.foreach_div_(product, 4.0)
    assert product[0].item() == 2.5
    compat.foreach_sign_(product)
    assert product[0].item() == 1.0
    compat.foreach_copy_(product, others)
    assert product[0].item() == 3.0


def test_attention_on_a_cpu_is_an_operator_of_its_name():
    query = torch.ones(1, 1, 4, 8)
    with Operators() as operators:
        functional.scaled_dot_product_attention(query, query, query)
    assert compat.CPU_ATTENTION in {each.overloadpacket.__name__ for each in operators.seen}


@pytest.mark.parametrize("name", sorted(compat.ATTENTION_OPERATORS))
def test_the_operators_of_attention_have_their_names(name):
    assert getattr(torch.ops.aten, name).default


def test_collectives_are_operators_of_their_namespace():
    assert getattr(torch.ops, compat.FUNCTIONAL_COLLECTIVES).all_reduce.default


def test_the_layout_of_a_tensor_is_pickled_by_its_name():
    assert pickle.loads(pickle.dumps(torch.strided)) is torch.strided
    assert compat.stored_layout.__name__.encode() in pickle.dumps(torch.strided)
    assert compat.stored_layout("torch.strided") is torch.strided


def test_moving_a_module_calls_what_takes_the_place_of_apply(monkeypatch):
    called = []
    place, name, value = compat.replacement_of_apply(lambda module, fn, recurse=True: called.append(fn) or module)
    assert callable(getattr(place, name))
    monkeypatch.setattr(place, name, value)
    nn.Linear(1, 1).half()
    assert len(called) == 1


def test_it_is_imported_without_the_parts_of_torch_that_take_a_second():
    program = (
        "import sys, ringmaster.compat; early = 'torch' in sys.modules; import ringmaster.compat.torch;"
        "print(early, 'torch.distributed.tensor' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.split() == ["False", "False"]
