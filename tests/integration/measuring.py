"""Worker targets of the tests of predicted memory: a rank's real steps under the same byte counter."""

import torch
from torch.distributed import ProcessGroup, ProcessGroupGloo, distributed_c10d

from ringmaster.codec import from_json, to_json
from ringmaster.techniques import registry
from ringmaster.techniques.checkpoints.state import HostCopies
from ringmaster.techniques.estimates.memory import Workload, predict_memory
from ringmaster.techniques.estimates.rank_memory import LiveBytes
from ringmaster.techniques.job import Job
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.processes.ranks import join
from ringmaster.techniques.technique import GangShape
from ringmaster.techniques.training.trainer import Trainer

FROM_ONE_TO_ANOTHER = ("send", "recv_", "recv_any_source_")  # point-to-point operations, which no thread of gloo runs


class OneThread(ProcessGroupGloo):
    """Gloo with one thread a group instead of two: a collective begins after the previous tensors are released."""

    def __init__(self, store, rank, size, timeout):
        options = ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [self.create_default_device()], 1, timeout
        super().__init__(store, rank, size, options)


class Settled(LiveBytes):
    """Counts the bytes that a rank holds, without tensors that gloo's threads have yet to release.

    A caller that waits for a collective continues before the thread that ran it has dropped its tensors. The moment of
    the release depends on when this thread gets a core and the interpreter's lock. Each collective is therefore
    followed by one without elements, which needs no peers and which the same thread begins later. All of these are
    waited for before a new peak is recorded.
    """

    def __init__(self):
        self._followers = []
        super().__init__()

    def run(self, func, args, kwargs):
        out = super().run(func, args, kwargs)
        if (group := group_of_collective(func, args)) is not None:
            self._followers.append(group.allreduce([torch.empty(0)]))
        return out

    def _note_peak(self):
        if self._live > self.peak:
            followers, self._followers = self._followers, []
            for follower in followers:
                follower.wait()
        super()._note_peak()


def group_of_collective(func, args):
    if func.namespace not in ("c10d", "_c10d_functional") or func._opname in FROM_ONE_TO_ANOTHER:
        return None
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "process_group":
            return ProcessGroup.unbox(value)
        if argument.name == "group_name":
            return distributed_c10d._resolve_process_group(value)
    return None


def measure(channel, argument):
    """Sends the peak bytes of tensors in the third step, and the bytes of a copy for a checkpoint."""
    rank, order = argument.pop("rank"), from_json(GangOrder, argument)
    technique = registry.load(order.technique)
    shape = GangShape(kind="cpu", num_devices=len(order.slots), memory_bytes=1 << 33)
    distributed_c10d.ProcessGroupGloo = OneThread
    ranks = join(order, rank, num_ranks=technique.num_ranks(shape), axes=technique.mesh_shape(shape, order.config))
    with Settled() as live:
        trainer = Trainer(order, technique, ranks, beat=lambda: None)
        for _ in range(3):
            live.enter("step")
            live.reset()
            trainer.step()
    copies = HostCopies(is_pinned=False)
    trainer.pieces(copies=copies)
    copied_bytes = sum(buffer.nbytes for buffer in copies._buffers.values())
    channel.send({"event": "measured", "peak_bytes": live.peak, "copied_bytes": copied_bytes})
    ranks.agree(True)
    return 0


def forecast(channel, argument):
    """Sends the memory estimates of choices given as (technique name, config, number of devices)."""
    choices = [
        (
            registry.load(registry.dotted_path(name)),
            config,
            GangShape(kind="cpu", num_devices=num_devices, memory_bytes=1 << 33),
        )
        for name, config, num_devices in argument["choices"]
    ]
    workload = Workload(
        job=from_json(Job, argument["job"]),
        data=argument["data"],
        facts=from_json(ModelFacts, argument["facts"]),
        techniques=registry.dotted_paths(),
        cache_dir=argument["cache_dir"],
    )
    found = predict_memory(workload, choices)
    channel.send({"event": "forecast", "forecasts": [to_json(forecast) for forecast in found]})
    return 0
