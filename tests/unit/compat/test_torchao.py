import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from ringmaster.compat.torchao import float8_linear

HAS_TORCHAO = find_spec("torchao") is not None


def test_importing_the_names_imports_no_torchao():
    program = "import sys, ringmaster.compat.torchao; sys.exit('torchao' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.skipif(not HAS_TORCHAO, reason="the extra torchao is not installed")
def test_a_subclass_of_float8_layers_keeps_the_parameters_of_a_plain_one():
    from torchao.float8 import Float8LinearConfig

    class Layer(float8_linear()):
        pass

    plain = nn.Linear(16, 32)
    made = Layer.from_float(plain, config=Float8LinearConfig(emulate=True))
    assert type(made) is Layer
    assert made.weight is plain.weight and made.bias is plain.bias
    assert made(torch.ones(2, 16)).shape == (2, 32)
