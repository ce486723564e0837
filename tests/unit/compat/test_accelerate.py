"""The private names of accelerate that `ringmaster.compat.accelerate` gives do what is relied on."""

import torch
from accelerate import Accelerator
from torch import nn

from ringmaster.compat.accelerate import prepared_model


def test_the_model_that_was_prepared_first_is_known():
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    prepared = accelerator.prepare(model)
    accelerator.prepare(nn.Linear(2, 2))
    assert prepared_model(accelerator) is prepared
