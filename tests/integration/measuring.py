"""What the tests of predicted memory run in worker processes: a rank's real steps under the same count of bytes."""

from techniques import registry
from techniques.engine.live_bytes import LiveBytes
from techniques.engine.memory import Workload, forecast_memory
from techniques.engine.models import ModelFacts
from techniques.engine.order import GangOrder
from techniques.engine.ranks import join
from techniques.engine.state import HostCopies
from techniques.engine.trainer import Trainer
from techniques.job import Job
from techniques.technique import GangShape
from techniques.values import from_json, to_json


def measure(channel, argument):
    """Sends the most bytes of tensors that were alive in the third step, and those of a copy for a checkpoint."""
    rank, order = argument.pop("rank"), from_json(GangOrder, argument)
    technique = registry.load(order.technique)
    shape = GangShape(kind="cpu", num_devices=len(order.slots), memory_bytes=1 << 33)
    ranks = join(order, rank, num_ranks=technique.num_ranks(shape), axes=technique.mesh_shape(shape, order.config))
    with LiveBytes() as live:
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
    """Sends the forecasts for choices given as (technique's name, config, number of devices)."""
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
    found = forecast_memory(workload, choices)
    channel.send({"event": "forecast", "forecasts": [to_json(forecast) for forecast in found]})
    return 0
