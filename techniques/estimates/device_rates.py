"""Measured rates of a machine's devices: computation, memory, operators and links.

The measurement takes about a second and is cached for the machine.
"""

import contextlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from ringmaster.codec import digest, to_json
from ringmaster.files import kept_value, read_value
from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore
from ringmaster.techniques.checkpoints.state import HostCopies, piece_writer, read_whole
from ringmaster.techniques.estimates.rank_memory import LiveBytes
from ringmaster.techniques.job import Job
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.processes.channel import Channel
from ringmaster.techniques.processes.gang_events import ReferenceTimed, event_to_json
from ringmaster.techniques.processes.order import Slot
from ringmaster.techniques.processes.ranks import BACKENDS, RankContext, show_gpus, take_device
from ringmaster.techniques.technique import OPTIMIZER_STATE_BYTES, WEIGHT_BYTES
from ringmaster.techniques.training.recomputation import recompute_layers

T = TypeVar("T")


def measured_once(cls: type[T], file: Path, measure: Callable[[], T], *, otherwise: str) -> T | None:
    """Returns the value in a file, or what `measure` returns, which is then kept there.

    otherwise: what is done where it raises RuntimeError, for the log; the value is None then.
    """
    try:
        return kept_value(cls, file, measure)
    except RuntimeError as error:
        print(f"{otherwise}: {error}", file=sys.stderr)
        return None


MAX_S = 180.0  # of a child process


def start_gpu_children() -> None:
    """Starts the process of which children that take GPUs are forked, while this one sees the GPUs.

    transformers remembers whether there is a GPU when its modules are imported.
    """
    multiprocessing.set_forkserver_preload(["ringmaster.techniques.estimates.measured_steps", __name__])
    forkserver.ensure_running()


def run_in_children(
    works: Sequence[Callable[[], Any]],
    *,
    at_once: int,
    timeout_s: float = MAX_S,
    until_s: float = math.inf,
    use_gpus: bool = False,
) -> Iterator[tuple[int, Any, str]]:
    """Runs functions in child processes, `at_once` side by side. Yields number, result and fault of each as it ends.

    A child that exceeds its time is killed, and its result is None, as is that of one that fails. Children leave no CPU
    pinning, threads or device contexts behind.

    until_s: CLOCK_MONOTONIC time after which no child is started.
    use_gpus: the functions, which can be pickled, take GPUs. Their children are not forked from this process: after the
        first backward of a process its forks can use no GPU (PyTorch counts the devices once, for autograd's threads).
    """
    context: Any = multiprocessing.get_context("forkserver" if use_gpus else "fork")
    left, running = list(enumerate(works)), dict[Connection, tuple[int, Any, float]]()  # number, process, end
    while running or (left and time.monotonic() < until_s):
        while left and len(running) < max(at_once, 1) and time.monotonic() < until_s:
            number, work = left.pop(0)
            answers, writer = context.Pipe(duplex=False)
            child = context.Process(target=_answer, args=(work, writer))
            child.start()
            writer.close()
            running[answers] = number, child, time.monotonic() + timeout_s
        left_s = min(end_s for _, _, end_s in running.values()) - time.monotonic()
        ready = wait([*running], max(left_s, 0.0))
        for answers in [each for each in running if each in ready] or [
            each for each, (_, _, end_s) in running.items() if end_s <= time.monotonic()
        ]:
            number, child, _ = running.pop(answers)
            text = ""
            if not ready:
                child.kill()
            else:
                with contextlib.suppress(EOFError):  # it has ended without an answer
                    text = answers.recv()
            answers.close()
            child.join()
            fault = f"the process ended with status {child.exitcode}" if ready else f"took longer than {timeout_s:g} s"
            yield number, json.loads(text) if text else None, "" if text else fault


def in_children(
    works: Sequence[Callable[[], Any]], *, timeout_s: float = MAX_S, use_gpus: bool = False
) -> list[dict[str, Any]]:
    """Runs all functions side by side in child processes and returns their results; see `run_in_children`.

    Raises RuntimeError where a child fails, which writes the reason to stderr, or exceeds the time limit.
    """
    children = run_in_children(works, at_once=len(works), timeout_s=timeout_s, use_gpus=use_gpus)
    ended = sorted(children, key=lambda each: each[0])
    if faults := [fault for _, _, fault in ended if fault]:
        print(f"a measurement: {faults[0]}", file=sys.stderr)
        raise RuntimeError("the devices could not be measured; the preflight's log, preflight.log, has the reason")
    return [answer for _, answer, _ in ended]


def _answer(work: Callable[[], Any], writer: Connection) -> NoReturn:
    status = 1
    show_gpus(())  # until it takes one
    try:
        writer.send(json.dumps(work()))
        status = 0
    except Exception:  # noqa: BLE001 - every exception goes to the log, and none into the parent's frames
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


WARM_UP = 3  # repetitions
# By type of device: the side of the matrices, the length of the vectors, and the least total of the measured seconds.
KERNEL_SIZES = {"cpu": (256, 1 << 19, 0.25), "cuda": (1024, 1 << 20, 0.01)}
SLOT_S = 0.2  # of a measurement without a trial, for which the first step waits: 50 time slices of a busy core


def time_reference(device: torch.device, *, least_s: float | None = None) -> ReferenceTimed:
    """Times the reference kernel on a device. It draws no random numbers, and keeps no memory.

    least_s: the least total of the measured seconds; by default that of the device's type.
    """
    side, length, usual_s = KERNEL_SIZES[device.type]
    matrix, vector = torch.ones(side, side, device=device), torch.ones(length, device=device)
    product, copy = torch.empty_like(matrix), torch.empty_like(vector)
    seconds: list[float] = []
    while len(seconds) < WARM_UP + 2 or sum(seconds[WARM_UP:]) < (least_s or usual_s):
        started_s = time.perf_counter()
        for _ in range(2):
            torch.mm(matrix, matrix, out=product)
            copy.copy_(vector)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started_s)
    measured = seconds[WARM_UP:]
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x{torch.get_num_threads()}"
    return ReferenceTimed(
        kind=kind, mean_s=statistics.fmean(measured), fastest_s=min(measured), spread=standard_error(measured)
    )


def time_on_ranks(ranks: RankContext) -> ReferenceTimed:
    """Times the reference kernel on the devices of a gang at once. Its slowest rank counts: the others wait for it."""
    timed = time_reference(ranks.device)
    return ReferenceTimed(
        kind=timed.kind,
        mean_s=ranks.max(timed.mean_s),
        fastest_s=-ranks.max(-timed.fastest_s),
        spread=ranks.max(timed.spread),
    )


def standard_error(seconds: Sequence[float]) -> float:
    """Returns the standard error of the mean of measured seconds, relative to the mean; 0 for a single one."""
    if len(seconds) < 2:
        return 0.0
    return statistics.stdev(seconds) / math.sqrt(len(seconds)) / statistics.fmean(seconds)


def main(channel: Channel, argument: dict[str, Any]) -> int:
    """Times the reference kernel on one CPU slot; the entry point of a worker process. argument: `cores`."""
    cores = argument["cores"]
    if cores:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(max(len(cores), 1))
    channel.send(event_to_json(time_reference(torch.device("cpu"), least_s=SLOT_S)))
    return 0


VERSION = 9
SMALL = 16  # sizes of a tiny decoder
NUM_LAYERS, NUM_MESSAGES = 4, 8
REPEATS = 12
PRODUCT_REPEATS = 50  # of which two rates are compared
MESSAGE, LINK_TIMEOUT_S = 1 << 15, 30.0  # elements of a message; seconds


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is timed on a kind of device: the side of matrices, the length of vectors, the bytes that are sent.

    They take milliseconds: far longer than a launch, and shorter than a time slice of a busy machine. Gradients do not
    stay in the caches of cores, as activations may.
    """

    matrix: int
    vector: int
    link_bytes: int
    gradient_bytes: int


SIZES = {
    "cpu": Sizes(matrix=512, vector=1 << 22, link_bytes=1 << 22, gradient_bytes=1 << 24),
    "cuda": Sizes(matrix=4096, vector=1 << 26, link_bytes=1 << 26, gradient_bytes=1 << 26),
}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one device, and of the link between two devices.

    flops_per_s: floating-point operations per second.
    bytes_per_s: bytes of memory read and written per second.
    operators_per_s: operators per second, of a decoder so small that launching them takes most of the time.
    link_bytes_per_s: bytes per second over the link.
    gradient_bytes_per_s: bytes per second over the link of gradients, which are copied into a bucket and summed there.
    message_s: seconds that a message takes at the least.
    watched_operators_per_s: like operators_per_s, where selective recomputation decides for each what to store.
    recomputed_operators_per_s: like operators_per_s, where full recomputation launches those of the forward again.
    wrapped_message_s: like message_s, for a message between distributed tensors.
    parallel: how many times as fast as one device two devices are that one process drives.
    host_bytes_per_s: bytes of host memory read and written per second by the device's cores.
    copy_bytes_per_s: bytes per second from pinned host memory to the device; infinite for CPU slots.
    """

    flops_per_s: float
    bytes_per_s: float
    operators_per_s: float
    link_bytes_per_s: float
    message_s: float
    watched_operators_per_s: float
    recomputed_operators_per_s: float
    wrapped_message_s: float
    parallel: float = 1.0
    gradient_bytes_per_s: float = math.inf
    host_bytes_per_s: float = math.inf
    copy_bytes_per_s: float = math.inf

    def times_of(self, number: int) -> float:
        """Returns how many times as fast as one device `number` devices are that one process drives with threads."""
        return 1 + (self.parallel - 1) * (number - 1)


def rates(slots: Sequence[Slot], *, precision: str, cache_dir: Path) -> Rates | None:
    """Returns the rates of these devices of one kind, CPU slots or GPUs, for jobs of a precision.

    They are measured once for each machine, in separate processes, and cached under `cache_dir`. None, with the reason
    in the log, where they cannot be measured; a process does not try that again for its next job.
    """
    dtype = "float32" if precision == "fp32" else "bfloat16"  # in which matrices are multiplied
    key = [os.uname().nodename, [to_json(slot) for slot in slots], dtype, torch.__version__, VERSION]
    file = cache_dir / f"rates-{digest(key)}.json"
    if file in _failed:
        return read_value(Rates, file)
    measured = measured_once(Rates, file, lambda: _measured(slots, dtype), otherwise="no step is predicted")
    if measured is None:
        _failed.add(file)
    return measured


_failed: set[Path] = set()  # the files of rates that this process could not measure


def _measured(slots: Sequence[Slot], dtype: str) -> Rates:
    are_gpus = slots[0].kind == "gpu"
    alone = in_children([partial(_device, (slots[0],), dtype)], use_gpus=are_gpus)[0]
    link = {"link_bytes_per_s": 1e9, "gradient_bytes_per_s": 1e9, "message_s": 1e-4, "wrapped_message_s": 1e-3}
    parallel = 1.0
    if len(slots) > 1:
        with tempfile.TemporaryDirectory() as folder:
            on_rank = partial(_link, meeting=f"{folder}/meeting", slots=tuple(slots[:2]))
            link = in_children([partial(on_rank, rank) for rank in (0, 1)], use_gpus=are_gpus)[0]
    if len(slots) > 1 and not are_gpus:
        every = in_children([partial(_device, tuple(slots), dtype)])[0]
        parallel = every["flops_per_s"] / alone["flops_per_s"]
    return Rates(**alone, **link, parallel=1 + max(parallel - 1, 0.0) / max(len(slots) - 1, 1))


def _device(slots: tuple[Slot, ...], dtype: str) -> dict[str, float]:
    device = take_device(slots, 0, num_ranks=1)
    sizes = SIZES[device.type]
    matrix = torch.ones(sizes.matrix, sizes.matrix, device=device, dtype=getattr(torch, dtype))
    vector, home = torch.ones(sizes.vector, device=device), torch.ones(sizes.vector)
    rates = {
        "flops_per_s": 2 * sizes.matrix**3 / _best_s(lambda: matrix @ matrix, device, repeats=PRODUCT_REPEATS),
        "bytes_per_s": _bytes_per_s(vector, device),
        "operators_per_s": _operators_per_s("none", device),
        "watched_operators_per_s": _operators_per_s("selective", device),
        "recomputed_operators_per_s": _operators_per_s("full", device),
    }
    if device.type == "cpu":
        return {**rates, "host_bytes_per_s": rates["bytes_per_s"]}
    pinned = home.pin_memory()
    copy_s = _best_s(lambda: vector.copy_(pinned, non_blocking=True), device)
    host_bytes_per_s = _bytes_per_s(home, torch.device("cpu"))
    return {**rates, "host_bytes_per_s": host_bytes_per_s, "copy_bytes_per_s": 4 * sizes.vector / copy_s}


def _bytes_per_s(vector: Tensor, device: torch.device) -> float:
    other = torch.empty_like(vector)
    return 3 * vector.nbytes / _best_s(lambda: torch.add(vector, vector, out=other), device)


def _operators_per_s(recompute: str, device: torch.device) -> float:
    """Operators per second: the operators of a step without recomputation over its seconds with `recompute`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": SMALL, "intermediate_size": SMALL, "vocab_size": SMALL, "num_hidden_layers": NUM_LAYERS}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, use_cache=False)).train().to(device)
    tokens = torch.zeros(1, SMALL, dtype=torch.int64, device=device)

    def step() -> None:
        model(input_ids=tokens).logits.sum().backward()

    step()
    with LiveBytes() as counted:
        step()
    recompute_layers(model, recompute)
    return counted.num_operators / _best_s(step, device)


def _link(rank: int, *, meeting: str, slots: tuple[Slot, ...]) -> dict[str, float]:
    device = take_device(slots, rank, num_ranks=2)
    store, timeout, backend = FileStore(meeting, 2), timedelta(seconds=LINK_TIMEOUT_S), BACKENDS[device.type]
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timeout)
    link_bytes, gradient_bytes = SIZES[device.type].link_bytes, SIZES[device.type].gradient_bytes
    large = torch.ones(link_bytes // 4, device=device)
    message = large[:MESSAGE]
    message_s = _best_s(lambda: [dist.all_reduce(message * 0.5) for _ in range(NUM_MESSAGES)], device) / NUM_MESSAGES
    mesh, tensor = init_device_mesh(device.type, (2,)), torch.ones(MESSAGE, device=device, requires_grad=True)
    wrapped_message_s = _best_s(lambda: _exchange(tensor, mesh), device) / NUM_MESSAGES
    # An all-reduce over n = 2 ranks moves 2 (n - 1) / n of the tensor.
    link_bytes_per_s = link_bytes / _best_s(lambda: dist.all_reduce(large), device)
    gradients, bucket = (torch.ones(gradient_bytes // 4, device=device) for _ in range(2))
    gradient_bytes_per_s = gradient_bytes / _best_s(lambda: _sum_gradients(gradients, bucket), device)
    return {
        "link_bytes_per_s": link_bytes_per_s,
        "gradient_bytes_per_s": gradient_bytes_per_s,
        "message_s": message_s,
        "wrapped_message_s": wrapped_message_s,
    }


def _sum_gradients(gradients: Tensor, bucket: Tensor) -> None:
    """Sums gradients over the ranks as DistributedDataParallel does, whose gradients are views of buckets."""
    bucket.copy_(gradients)
    dist.all_reduce(bucket)


def _exchange(tensor: Tensor, mesh: DeviceMesh) -> None:
    """Runs all-reduces one after another, wrapped as in tensor-parallel layers, and their backward."""
    for _ in range(NUM_MESSAGES):
        tensor = DTensor.from_local(tensor * 0.5, mesh, [Partial()]).redistribute(mesh, [Replicate()]).to_local()
    tensor.sum().backward()  # type: ignore[no-untyped-call]


def undisturbed_s() -> float:
    """Returns a time whose differences are the seconds in which this thread did not wait for a core.

    It computed, or waited for a disk or another process. Where the kernel does not count, these are all seconds.
    """
    while True:
        waited_ns = _waited_ns()
        now_s = time.perf_counter()
        if _waited_ns() == waited_ns:  # else it waited between the two readings, for longer than what is timed may take
            return now_s - waited_ns / 1e9


def _waited_ns() -> int:
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, IndexError):
        return 0


def _best_s(work: Callable[[], Any], device: torch.device, *, repeats: int = REPEATS) -> float:
    """Seconds of the fastest of several runs: the device's rate when other processes disturb it least."""
    seconds = []
    for _ in range(repeats + 1):
        started_s = undisturbed_s()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(undisturbed_s() - started_s)
    return min(seconds[1:])


DISK_VERSION = 3
LARGE = 1 << 20  # elements of the state that is written to measure the disk; far shorter than a time slice
DISK_REPEATS = 6  # of which the fastest counts, as other processes disturb it least
PROCESS_S, RANKS_S = 0.15, 0.35  # of a fork from a process that has torch imported; of several ranks that meet
EXPORT_S = 0.05  # of a model's config, tokenizer and checksums
FIRST_STEPS = 0.5  # steps by which the first ones together take longer than later ones
INITIALIZED_BYTES_PER_S = 4e8  # of random weights


@dataclass(frozen=True, kw_only=True)
class DiskRates:
    """How fast checkpoints are written and read on this machine.

    fixed_s: seconds of a checkpoint of next to nothing.
    write_bytes_per_s, read_bytes_per_s: of the bytes beyond that.
    copy_bytes_per_s: of a copy in memory, from which a checkpoint is written while training continues.
    """

    fixed_s: float
    write_bytes_per_s: float
    read_bytes_per_s: float
    copy_bytes_per_s: float


def segment_costs(
    job: Job,
    *,
    facts: ModelFacts,
    num_held_out: int,
    num_ranks: int,
    step_s: float,
    forward_share: float,
    disk: DiskRates,
    generating_s: float = 0.0,
) -> dict[str, float]:
    """Returns the predicted seconds of a job outside its steps under an option, by the names of a `Candidate`'s fields.

    step_s: predicted seconds of a step; 0 where they are unknown.
    forward_share: the part of a step that a batch of an evaluation takes.
    generating_s: the seconds in which the model writes to such a batch, for metrics that read it.
    """
    trained = facts.num_updated * WEIGHT_BYTES
    weights = trained if job.adapter is not None else facts.parameter_bytes
    state = weights + facts.num_updated * OPTIMIZER_STATE_BYTES[job.optimizer.name]
    writing_s = state / disk.write_bytes_per_s
    num_batches = -(-min(num_held_out, job.max_evaluated_rows) // job.global_batch_size)
    building_s = facts.parameter_bytes / INITIALIZED_BYTES_PER_S
    return {
        "startup_s": PROCESS_S + (RANKS_S if num_ranks > 1 else 0.0) + building_s + FIRST_STEPS * step_s,
        "save_s": disk.fixed_s + writing_s,
        # A background save of a CPU slot takes time of the cores that train.
        "stall_s": state / disk.copy_bytes_per_s + writing_s / 2,
        "evaluate_s": num_batches * (forward_share * step_s + generating_s),
        "export_s": EXPORT_S + state / disk.read_bytes_per_s + weights / disk.write_bytes_per_s,
    }


@cache
def disk_rates(cache_dir: Path) -> DiskRates:
    """Returns the rates of the disk that `cache_dir` lies on, which are measured once for each machine."""
    file = cache_dir / f"disk-{digest([os.uname().nodename, DISK_VERSION])}.json"
    cache_dir.mkdir(parents=True, exist_ok=True)
    return kept_value(DiskRates, file, lambda: _measured_disk(cache_dir))


def _measured_disk(folder: Path) -> DiskRates:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        small_s, _ = _fastest_s(Path(scratch) / "small", 1)
        large_s, read_s = _fastest_s(Path(scratch) / "large", LARGE)
    state, copies = {"model/weight": torch.ones(LARGE)}, HostCopies(is_pinned=False)
    seconds = []
    for _ in range(DISK_REPEATS):
        started_s = undisturbed_s()
        copies.take(state)
        seconds.append(undisturbed_s() - started_s)
    num_bytes = LARGE * WEIGHT_BYTES
    return DiskRates(
        fixed_s=small_s,
        write_bytes_per_s=num_bytes / max(large_s - small_s, 1e-4),
        read_bytes_per_s=num_bytes / max(read_s, 1e-4),
        copy_bytes_per_s=num_bytes / max(min(seconds), 1e-5),
    )


def _fastest_s(folder: Path, num_elements: int) -> tuple[float, float]:
    """Seconds in which a state of this size is written, and read."""
    state, written_s, read_s = {"model/weight": torch.ones(num_elements)}, [], []
    for i in range(DISK_REPEATS):
        store, started_s = CheckpointStore(folder / str(i)), undisturbed_s()
        store.save(1, piece_writer(state), {})
        written_s.append(undisturbed_s() - started_s)
        started_s = undisturbed_s()
        checkpoint = store.newest()
        assert checkpoint is not None
        read_whole(checkpoint, prefix="model/")
        read_s.append(undisturbed_s() - started_s)
    return min(written_s), min(read_s)
