"""Estimates one rank's step, without a device, on tensors that have shapes but no values.

The result is the memory that the rank would hold and the work that it would do. The trainer, the technique and the
model are the real ones, so that they need no second description. The peers are a process group that sends nothing.
Sources: PyTorch's FakeTensorMode and FakeProcessGroup.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import flop_registry

from ringmaster import features
from ringmaster.codec import from_json
from ringmaster.compat.torch import (
    CPU_ATTENTION,
    READ_VALUE,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    is_mutable,
    is_wrapper,
    own_buffers,
    own_parameters,
    replacement_of_apply,
    storage_key,
    tree_leaves,
    unset_fake_temporarily,
)
from ringmaster.compat.torch_distributed import init_fake_group, replacement_of_tracing
from ringmaster.compat.transformers import replacements_without_values
from ringmaster.techniques import registry
from ringmaster.techniques.data import PreparedData
from ringmaster.techniques.data_source import SampleTensor
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_specs import Adapter
from ringmaster.techniques.models.architectures import instantiate
from ringmaster.techniques.models.build import build_model, model_config, skeleton
from ringmaster.techniques.models.layers import layer_names
from ringmaster.techniques.models.peft_format import resolved
from ringmaster.techniques.probing import known_draws
from ringmaster.techniques.probing.tiny import with_image_tokens
from ringmaster.techniques.processes.order import TRIAL, GangOrder, Slot
from ringmaster.techniques.processes.ranks import RankContext
from ringmaster.techniques.technique import ATTENTION, KERNELS, GangShape, Technique
from ringmaster.techniques.training import rank_job
from ringmaster.techniques.training import trainer as trainers
from ringmaster.techniques.training.dropout import DrawSites
from ringmaster.techniques.training.gradients import local

SETTING_UP = "setting up"


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts each storage from the operator that creates it until its last reference is gone.

    peaks: the most bytes alive at the same time, by phase; `enter` begins a phase.
    num_flops, num_bytes, num_operators: floating-point operations, bytes read and written, and operators since `reset`.
        Operators that only return a view are not counted.

    Wrappers (distributed tensors) count as the tensors that they wrap. A tensor that was created earlier is counted
    when an operator returns it.

    on_host: returns the bytes of the tensors that lie in host memory in training; they are not counted from the next
        phase on.
    """

    on_host: Callable[[], int] | None = None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, Any] = {}
        self._live = self._host_bytes = 0
        self._phase = SETTING_UP
        self.peaks: dict[str, int] = {}
        self.reset()

    def __enter__(self) -> Self:
        """Starts to count.

        Only one such mode may be active at a time: resizing a storage is not an operator, so its method is patched
        globally.
        """
        resize = self._resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            key = storage_key(storage)
            if (known := self._sizes.get(key)) is not None:  # FSDP frees gathered weights by resizing
                size = self._sizes[key] = storage.nbytes()
                self._live += size - known
                self._note_peak()
            return done

        torch.UntypedStorage.resize_ = counted  # type: ignore[assignment, method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    @property
    def live(self) -> int:
        """Bytes alive now."""
        return self._live

    @property
    def peak(self) -> int:
        """The most bytes alive at once since `reset`."""
        return max(self.peaks.values(), default=self._live)

    def reset(self) -> None:
        """Clears peaks and counts; live tensors stay counted."""
        self.peaks.clear()
        self.num_flops = self.num_bytes = self.num_operators = 0

    def enter(self, phase: str) -> None:
        """Begins `phase`: all peaks from now on belong to it."""
        self._phase = phase
        self._host_bytes = 0 if self.on_host is None else self.on_host()
        self._note_peak()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operator, then counts its results; wrappers are unwrapped first, as operators on what they wrap."""
        if any(hasattr(kind, "__tensor_flatten__") and kind is not FakeTensor for kind in types):
            return NotImplemented
        out = self.run(func, args, dict(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and not is_wrapper(leaf)]
        is_new = [self._count(tensor) for tensor in tensors]
        self._note_work(func, args, kwargs or {}, out, does_more=any(is_new) or is_mutable(func))
        self._note_peak()
        return out

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs `func` and returns its result; a subclass may compute the result itself."""
        return func(*args, **kwargs)

    def _count(self, tensor: Tensor) -> bool:
        """Counts a tensor's storage; returns whether it is new."""
        storage = tensor.untyped_storage()
        key, size = storage_key(storage), storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._sizes[key] = size
        self._live += size - (known or 0)
        return known is None

    def _forget(self, key: int) -> None:
        del self._watched[key]
        size = self._sizes.pop(key)  # first: process group threads run this too, possibly between load and store
        self._live -= size

    def _note_peak(self) -> None:
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self._live - self._host_bytes)

    def _note_work(self, func: Any, args: Any, kwargs: Mapping[str, Any], out: Any, *, does_more: bool) -> None:
        if not does_more:
            return
        given = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        self.num_operators += 1
        self.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in given)
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.num_flops += int(formula(*args, **kwargs, out_val=out))
        elif CPU_ATTENTION in func.overloadpacket.__name__:
            self.num_flops += _attention_flops(given, is_backward="backward" in func.overloadpacket.__name__)


def watch_layers(live: LiveBytes, layers: list[nn.Module]) -> None:
    """Makes each layer's forward and backward a phase: "forward 0", ..., "backward 0".

    The head and the loss belong to the last layer's forward. The embedding's backward belongs to the first layer's
    backward.
    """
    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, i=i: live.enter(f"forward {i}"))
        layer.register_forward_hook(
            lambda _module, _args, out, i=i: on_gradient(out, partial(live.enter, f"backward {i}"))
        )


def on_gradient(values: Any, mark: Callable[[], None]) -> None:
    """Calls `mark` when a gradient arrives at the first of some values that gets one."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(lambda _: mark())  # type: ignore[no-untyped-call]
            return


def _attention_flops(given: list[Tensor], *, is_backward: bool) -> int:
    """Floating-point operations of attention over tensors [rows, heads, tokens, dim].

    The forward has two products, q k^T and p v. The backward has five, one of which recomputes the scores.
    """
    query, key = (given[1], given[2]) if is_backward else (given[0], given[1])
    rows, heads, num_queries, dim = query.shape
    return (5 if is_backward else 2) * 2 * rows * heads * num_queries * key.shape[2] * dim


NUM_STEPS = 2  # the optimizer's state, and all else that stays, exists from the second step on


@dataclass(frozen=True, kw_only=True)
class RankScenario:
    """One rank of a gang that trains `job`.

    data: the JSON form of the prepared data; only its shapes are used, unless a factory makes the samples.
    technique: the dotted path of its class.
    num_layers: the number of layers to build; None for all.
    """

    job: Job
    data: Mapping[str, Any]
    technique: str
    config: Mapping[str, Any]
    shape: GangShape
    cache_dir: str
    rank: int = 0
    num_layers: int | None = None


@dataclass(frozen=True, kw_only=True)
class RankEstimate:
    """The memory and the work of one rank's step.

    peaks: peak bytes of the device by phase (see `watch_layers`).
    saved_bytes: bytes that the rank writes into a checkpoint; None where ranks must communicate to determine them.
    num_flops, num_bytes, num_operators: floating-point operations, bytes read and written, and operators.
    """

    peaks: Mapping[str, int]
    saved_bytes: int | None
    num_flops: int
    num_bytes: int
    num_operators: int


def estimate_rank(scene: RankScenario) -> RankEstimate:
    """Runs two steps and reports the second one.

    Its process must end afterwards, because parts of torch are replaced in it. Raises whatever a model or technique
    raises where it reads values, as there are none.
    """
    technique = registry.load(scene.technique)
    axes, num_ranks = technique.mesh_shape(scene.shape, scene.config), technique.num_ranks(scene.shape)
    slots = tuple(Slot(kind="cpu", index=i) for i in range(scene.shape.num_devices))
    order = GangOrder(
        purpose=TRIAL,
        job=replace(scene.job, compile=False, adapter=_fresh(scene.job.adapter)),
        technique=scene.technique,
        config={
            key: value for key, value in scene.config.items() if key != KERNELS or str(value).startswith(ATTENTION)
        },
        slots=slots,
        folder=scene.cache_dir,
        cache_dir=scene.cache_dir,
        data=scene.data,
    )
    _stand_in(scene)
    ranks = _ranks(scene.rank, num_ranks, axes)
    with FakeTensorMode(allow_non_fake_inputs=True), _MetaOperators() as live:
        trainer = trainers.Trainer(order, technique, ranks, beat=lambda: None)
        layers = [trainer._plain.get_submodule(name) for name in layer_names(trainer._plain)]
        if "pp" not in axes:  # pipeline stages have their own layer modules
            watch_layers(live, layers)
        trainer.optimizer.register_step_pre_hook(lambda *_: live.enter("update"))
        if scene.shape.kind == "gpu" and technique.updates_on_host(scene.config):
            live.on_host = partial(_bytes_on_host, trainer, technique)
        for _ in range(NUM_STEPS):
            live.enter("step")
            live.reset()
            trainer.step()
        peaks = dict(live.peaks)
        saved_bytes = _saved_bytes(trainer)
    return RankEstimate(
        peaks=peaks,
        saved_bytes=saved_bytes,
        num_flops=live.num_flops,
        num_bytes=live.num_bytes,
        num_operators=live.num_operators,
    )


def _bytes_on_host(trainer: trainers.Trainer, technique: Technique) -> int:
    """Bytes of the weights, their gradients and the optimizer's state, where a technique keeps them in host memory."""
    parameters = [*trainer.model.parameters()]
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [value for of_one in trainer.optimizer.state.values() for value in of_one.values()]
    tensors = [t for t in (*parameters, *gradients, *state, *technique.on_host()) if isinstance(t, Tensor)]
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage_key(storage): storage.nbytes() for storage in storages}.values())


def _fresh(adapter: Adapter | None) -> Adapter | None:
    """The same adapter, without the files of a pretrained one."""
    return None if adapter is None else replace(resolved(adapter), from_pretrained=None)


def _saved_bytes(trainer: trainers.Trainer) -> int | None:
    try:
        written = trainer.written()
    except RuntimeError:  # the fake process group returns no values
        return None
    return sum(part.numel() * part.element_size() for part in map(local, written.values()))


class _MetaOperators(LiveBytes):  # type: ignore[no-untyped-call]
    """Returns constants for operators that read values; operators on real tensors (meshes, samples) run unchanged."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if tensors and all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is READ_VALUE:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **kwargs)


class _Ranks(RankContext):
    """Ranks whose peers send nothing; sums are never zero, since counts are used as divisors."""

    def sum(self, values: list[float]) -> list[float]:
        return [value or 1.0 for value in values]


def _ranks(rank: int, num_ranks: int, axes: Mapping[str, int]) -> RankContext:
    device = torch.device("cpu")
    if num_ranks == 1:
        return _Ranks(rank=0, num_ranks=1, device=device, mesh=None)
    init_fake_group(rank=rank, num_ranks=num_ranks)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))  # outside of the fake mode
    return _Ranks(rank=rank, num_ranks=num_ranks, device=device, mesh=mesh)


def _stand_in(scene: RankScenario) -> None:
    """Replaces functions of this process that cannot work without values."""
    for place, name, value in replacements(scene):
        assert hasattr(place, name), f"{place.__name__} has no {name}, which estimates of memory replace"
        setattr(place, name, value)


def replacements(scene: RankScenario) -> list[tuple[Any, str, Any]]:
    """Returns what `_stand_in` replaces: the class or module, the name in it, and what takes its place.

    A name that is no longer looked up there would be replaced to no effect, so a test counts the calls of each. Those
    of other libraries are in all versions from torch 2.11 and transformers 5.9 on; some of them are private.
    """
    from torch.nn import parallel

    from ringmaster.techniques.sharding import experts, sequences
    from ringmaster.techniques.training import dropout

    prepared = from_json(PreparedData, scene.data)
    # A model that was not probed, because its data is not there, may draw random numbers.
    known = known_draws(scene.job, data=prepared, cache_dir=Path(scene.cache_dir)) or DrawSites(draws=True)
    replaced: list[tuple[Any, str, Any]] = [
        replacement_of_apply(_apply),
        (parallel, "DistributedDataParallel", _Replicas),
        (
            sequences,
            "causal_lower_right",
            lambda queries, keys: torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries),
        ),
        (experts, "sizes_of", lambda counts, *, total: [total // len(counts)] * len(counts)),  # as if routed evenly
        *replacements_without_values(),
        replacement_of_tracing(lambda: False),
        (trainers, "draws_of", lambda job, *, data, cache_dir: known),
        (
            dropout,
            "kept",
            lambda keys, shape, p, device: torch.empty(len(keys), *shape, dtype=torch.bool, device=device),
        ),
        (rank_job, "prepare", lambda *_, pinned, **__: pinned),
        (trainers, "build_model", lambda spec, *, data, seed, **_: _model(scene, data, seed)),
    ]
    if prepared.tensors or prepared.kind in ("tokens", "images"):
        samples = _Samples(prepared)
        replaced.append((rank_job, "open_data", lambda *_, **__: (samples, samples)))
    for module in features.modules("trainer"):
        replaced += [(module, name, value) for name, value in getattr(module, "WITHOUT_VALUES", {}).items()]
    return replaced


def _model(scene: RankScenario, data: PreparedData, seed: int) -> nn.Module:
    """The model with fresh weights that have no values; pretrained weights are not read."""
    spec = scene.job.model
    if spec.factory is not None and not data.parts:
        return build_model(spec, data=data, seed=seed)
    if data.parts:
        with unset_fake_temporarily():
            model = skeleton(spec, data)
    else:
        config = model_config(spec, data)
        if getattr(config, "apply_spec_augment", False):  # whose masks are values; they take no memory to speak of
            config.apply_spec_augment = False
        if scene.num_layers is not None:
            config.num_hidden_layers = scene.num_layers
            if getattr(config, "layer_types", None) is not None:
                config.layer_types = config.layer_types[: scene.num_layers]
        with unset_fake_temporarily(), torch.device("meta"):  # initialisation draws no values, nor redraws them
            model = instantiate(config).train()
    return _apply(model, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))


class _Samples:
    """Any number of samples with the shapes of the data."""

    def __init__(self, prepared: PreparedData) -> None:
        self._prepared = prepared

    def __len__(self) -> int:
        return max(self._prepared.num_samples, 1)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[0] for name, column in self.rows([index]).items()}

    def rows(self, indices: Any) -> dict[str, Tensor]:
        data, num_rows = self._prepared, len(indices)
        with unset_fake_temporarily():
            if data.tensors:
                return with_image_tokens({t.name: _ones(t, num_rows) for t in data.tensors}, data)
            if data.kind == "tokens":
                tokens = torch.ones(num_rows, data.seq_len or 1, dtype=torch.int64)
                return {"input_ids": tokens, "labels": tokens}
            size = data.image_size or 1
            labels = torch.ones(num_rows, dtype=torch.int64)
            return {"pixel_values": torch.zeros(num_rows, data.num_channels or 1, size, size), "labels": labels}


def _ones(described: SampleTensor, num_rows: int) -> Tensor:
    """Tensors of a batch. Its samples are padded: for batches without padding, models may make no attention masks."""
    tensor = torch.ones(num_rows, *described.shape, dtype=getattr(torch, described.dtype))
    if described.name.endswith("attention_mask"):
        tensor[..., -1] = 0
    return tensor


class _Replicas(nn.Module):
    """Stand-in for DistributedDataParallel, whose reducer copies bytes.

    Its buckets are as large as all gradients, and the gradients lie in them.
    """

    def __init__(self, module: nn.Module, process_group: Any = None, **_: Any) -> None:
        super().__init__()
        self.module, self.process_group, self._exchanges = module, process_group, True
        for parameter in module.parameters():
            if parameter.requires_grad:
                bucket = torch.empty_like(parameter, requires_grad=False)
                parameter.register_post_accumulate_grad_hook(self._hook(bucket))  # type: ignore[no-untyped-call]

    def _hook(self, bucket: Tensor) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            if self._exchanges:
                assert parameter.grad is not None
                bucket.copy_(parameter.grad)
                parameter.grad = bucket

        return arrived

    def register_comm_hook(self, *_: Any) -> None:
        """Ignores the hook, which rounds one bucket at a time and so needs little memory."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets gradients accumulate outside of the buckets."""
        self._exchanges = False
        yield
        self._exchanges = True


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replaces nn.Module._apply, which swaps tensors in a way that fake tensors do not support.

    A changed tensor is assigned in place of the old one; a shared tensor is converted once.
    """
    changed: dict[int, Tensor] = {}
    with torch.no_grad():
        for module in self.modules():
            for tensors in (own_parameters(module), own_buffers(module)):
                for name, tensor in list(tensors.items()):
                    if tensor is None:
                        continue
                    if id(tensor) not in changed:
                        new = fn(tensor)
                        is_parameter = isinstance(tensor, nn.Parameter) and new is not tensor
                        changed[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
                    tensors[name] = changed[id(tensor)]  # type: ignore[assignment]
    return self
