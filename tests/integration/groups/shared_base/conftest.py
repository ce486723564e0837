"""A base, three jobs that adapt it, and the result of each job when it is trained alone."""

from dataclasses import replace

import pytest
import torch

from ringmaster.codec import digest
from ringmaster.techniques import ScheduleSpec
from tests.integration.groups.shared_base.groups import BRIEF, EVEN, HEADED, IA3, LEADER, LORA, Groups
from tests.integration.workbench import ADAMW, SGD, SINGLE


@pytest.fixture(scope="package")
def base(bench):
    """A folder with the weights that all adapters leave unchanged."""
    torch.set_num_threads(1)  # as in the gangs
    return bench.reference(bench.job(optimizer=ADAMW)).order.model_dir


@pytest.fixture(scope="package")
def jobs(bench):
    """The lead job, one like it with its own head, and one that differs in every setting and has the fewest steps."""
    job = bench.job(name=LEADER, base="stem", adapter=LORA, optimizer=replace(ADAMW, lr=0.01), num_steps=30)
    brief = replace(
        job,
        name=BRIEF,
        adapter=IA3,
        optimizer=replace(SGD, options={"momentum": 0.9}),
        global_batch_size=4,
        num_steps=12,
        seed=2,
    )
    even = replace(job, name=EVEN, adapter=HEADED, seed=1, num_steps=25, schedule=ScheduleSpec(name="cosine"))
    return [job, even, brief]


@pytest.fixture(scope="package")
def alone(bench, base, tmp_path_factory):
    """Trains a job by `single`, undisturbed; each job once."""
    trained, folder = {}, tmp_path_factory.mktemp("alone")

    def train(job):
        name = digest(job)
        if name not in trained:
            trained[name] = bench.train(job, SINGLE, folder / name, weights_from=base)
        return trained[name]

    return train


@pytest.fixture
def groups(bench, base, tmp_path):
    return Groups(bench, base, tmp_path)
