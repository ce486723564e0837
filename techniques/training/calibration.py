"""Calibration of a device: the bits of a small training, by which nodes that compute other bits are recognized.

The bits of trained weights depend on the instruction set, the number of threads and the versions of libraries. Work
that is repeated elsewhere can be compared where all of these agree.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

from ringmaster.codec import digest
from ringmaster.techniques.checkpoints.environment import versions
from ringmaster.techniques.processes.rank_environment import rank_environment

NUM_STEPS, WIDTH, LENGTH, BATCH = 4, 256, 64, 16
TIMEOUT_S = 600.0


def calibrated_bits(*, kind: str, cores: Sequence[int], uuid: str) -> str:
    """Returns the digest of a training on a device, in a process of its own, and of the libraries' versions.

    kind: "cpu" or "gpu". cores: of the device. uuid: of a GPU.

    Raises RuntimeError where the training fails.
    """
    environment = rank_environment() | ({"CUDA_VISIBLE_DEVICES": uuid} if kind == "gpu" else {})
    command = [sys.executable, "-m", __name__, kind, ",".join(map(str, cores))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the calibration failed: {done.stderr[-1000:]}")
    return digest([done.stdout.strip(), versions()], length=32)


def _trained(kind: str) -> str:
    """Returns the digest of the weights of a small transformer layer after a few steps."""
    import torch
    from torch import nn

    from ringmaster.techniques.checkpoints.tensor_files import digest_of

    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda" if kind == "gpu" else "cpu")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Conv1d(LENGTH, LENGTH, 3, padding=1), layer, nn.Linear(WIDTH, WIDTH))
    inputs = torch.randn(NUM_STEPS, BATCH, LENGTH, WIDTH).to(device)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in inputs:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.argmax(-1).flatten())
        torch.autograd.backward(loss)
        optimizer.step()
    return digest_of(model.parameters())


if __name__ == "__main__":
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    own_kind, own_cores = sys.argv[1], {int(core) for core in sys.argv[2].split(",")}
    import torch

    os.sched_setaffinity(0, own_cores)
    torch.set_num_threads(len(own_cores))
    print(_trained(own_kind))
