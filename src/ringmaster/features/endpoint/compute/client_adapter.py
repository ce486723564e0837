"""One client's LoRA: its weights, their gradients and the moments of Adam, each in one row of memory."""

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ringmaster.features.endpoint.compute.requests import AdamStep, AdapterSpec
from ringmaster.techniques.job_specs import Adapter
from ringmaster.techniques.models.adapter_modules import is_adaptable
from ringmaster.techniques.models.adapters import first_state, sites
from ringmaster.techniques.models.layers import layer_names
from ringmaster.techniques.models.peft_format import read_adapter
from ringmaster.techniques.multi_adapter.adapter_runs import AdapterModules, adapter_modules_of
from ringmaster.techniques.multi_adapter.parameter_rows import ParameterRow, in_order_of, tree_of

ALPHA = 32.0
"""The scale of every adapter before the division by its rank, as of the service whose API this is."""
OF_ATTENTION = ("attn", "attention")
OPTIMIZER_FILE, AVERAGE, SQUARE, STEP = "optimizer.safetensors", "exp_avg", "exp_avg_sq", "step"


def lora_of(spec: AdapterSpec, model: nn.Module) -> Adapter:
    """Returns the adapter of a client on `model`. Raises ValueError where it would train nothing."""
    layers = tuple(f"{name}." for name in layer_names(model))
    head = getattr(model, "get_output_embeddings", lambda: None)()
    targets = []
    for name, module in model.named_modules():
        if not is_adaptable(module):
            continue
        if name.startswith(layers):
            is_attention = any(part in name.lower() for part in OF_ATTENTION)
            is_trained = spec.train_attn if is_attention else spec.train_mlp
        else:
            is_trained = spec.train_unembed and module is head
        if is_trained:
            targets.append(name)
    if not targets:
        raise ValueError("adapter: it trains nothing. To fix: set train_mlp, train_attn or train_unembed")
    return Adapter(rank=spec.rank, alpha=ALPHA, targets=tuple(targets))


class NonFiniteGradientsError(ValueError):
    """A step was refused, and the gradients were dropped."""


class ClientAdapter:
    """The state of one client.

    step: the number of optimizer steps taken. has_gradients: whether any were computed since the last one.
    grad_norm: the norm of the gradients of the last step; None before any, and behind a checkpoint that was loaded.
    """

    def __init__(self, spec: AdapterSpec, model: nn.Module) -> None:
        self.spec, self.adapter = spec, lora_of(spec, model)
        self.sites = sites(model, self.adapter)
        device = next(model.parameters()).device
        state = first_state(model, self.adapter, self.sites, seed=spec.seed)
        self._tree = tree_of(in_order_of(model, {name: value.to(device) for name, value in state.items()}))
        self.row = ParameterRow(self._tree)
        self.average, self.square = (torch.zeros_like(self.row.values) for _ in range(2))
        self.step, self.has_gradients = 0, False
        self.grad_norm: float | None = None
        self._modules: tuple[int, AdapterModules] = (-1, AdapterModules())

    def weights(self) -> dict[str, Tensor]:
        """Returns the tensors of the adapter by the names of the model's parameters."""
        return {name: parameter.detach() for name, parameter in self._tree.named_parameters()}

    def modules(self) -> AdapterModules:
        """Returns the adapter's modules in the base."""
        if self._modules[0] != self.row.num_moves:
            named = dict(self._tree.named_parameters())
            self._modules = (self.row.num_moves, adapter_modules_of(self.adapter, self.sites, (), named))
        return self._modules[1]

    @property
    def gradients(self) -> Tensor:
        """The row of the gradients, which each backward overwrites."""
        assert self.row.gradients is not None
        return self.row.gradients

    @torch.no_grad()
    def take_step(self, adam: AdamStep) -> float:
        """Takes one step of AdamW, with the gradients clipped first; returns their norm before.

        Raises ValueError where a setting is out of its range or there are no gradients, and NonFiniteGradientsError,
        with the gradients dropped, where they are not finite.
        """
        if reason := _obstacle(adam):
            raise ValueError(reason)
        if not self.has_gradients:
            raise ValueError("there are no gradients since the last step. To fix: call forward_backward first")
        self.has_gradients = False
        norm = float(torch.linalg.vector_norm(self.gradients))
        if not math.isfinite(norm):
            raise NonFiniteGradientsError(
                "the gradients are not finite. To fix: check the weights and advantages of the rows"
            )
        if adam.grad_clip_norm > 0:
            self.gradients.mul_(min(1.0, adam.grad_clip_norm / (norm + 1e-6)))
        adamw(
            [self.row.values],
            [self.gradients],
            [self.average],
            [self.square],
            [],
            [torch.tensor(float(self.step), device=self.average.device)],  # to which it adds 1
            fused=True,
            amsgrad=False,
            lr=adam.learning_rate,
            beta1=adam.beta1,
            beta2=adam.beta2,
            weight_decay=adam.weight_decay,
            eps=adam.eps,
            maximize=False,
        )
        self.step, self.grad_norm = self.step + 1, norm
        return norm

    # -- what is stored ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Returns all tensors that determine what follows, without copying them."""
        named = {"values": self.row.values, AVERAGE: self.average, SQUARE: self.square}
        return {**named, "gradients": self.gradients} if self.has_gradients else named

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor], *, step: int, grad_norm: float | None) -> None:
        """Restores what `state` returned, in place."""
        for name, value in self.state().items():
            value.copy_(state[name])
        self.has_gradients = "gradients" in state
        if self.has_gradients:
            self.gradients.copy_(state["gradients"])
        self.step, self.grad_norm = step, grad_norm

    def optimizer_state(self) -> dict[str, Tensor]:
        """Returns the moments of Adam by the names of the model's parameters, and its number of steps."""
        moments = {AVERAGE: self.average, SQUARE: self.square}
        named = {
            f"optimizer/{name}/{key}": value.contiguous()
            for key, moment in moments.items()
            for name, value in self.row.parts_of(moment).items()
        }
        return {**named, STEP: torch.tensor(self.step)}

    @torch.no_grad()
    def load(self, folder: Path, model: nn.Module, *, with_optimizer: bool) -> None:
        """Replaces the weights by those of a checkpoint, and the optimizer's state by its own or by a fresh one.

        Raises ValueError, with nothing changed, where the checkpoint does not fit.
        """
        weights = checkpoint_weights(folder, self.adapter, model)
        moments: dict[str, Tensor] = {}
        if with_optimizer:
            from safetensors.torch import load_file

            if not (folder / OPTIMIZER_FILE).is_file():
                raise ValueError(f"{folder.name} was saved without its optimizer. To fix: load its weights alone")
            moments = load_file(folder / OPTIMIZER_FILE)
        for name, parameter in self._tree.named_parameters():
            parameter.copy_(weights[name])
        for key, moment in ((AVERAGE, self.average), (SQUARE, self.square)):
            moment.zero_()
            for name, part in self.row.parts_of(moment).items():
                if with_optimizer:
                    part.copy_(moments[f"optimizer/{name}/{key}"])
        self.step, self.has_gradients = int(moments.get(STEP, torch.tensor(0))), False
        self.grad_norm = None


def _obstacle(adam: AdamStep) -> str | None:
    """Returns why a step cannot be taken with these settings."""
    for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
        if not 0.0 <= (value := getattr(adam, name)) < math.inf:
            return f"{name} is {value}. To fix: take a number of at least 0"
    for name in ("beta1", "beta2"):
        if not 0.0 <= (value := getattr(adam, name)) < 1.0:
            return f"{name} is {value}. To fix: take a number of at least 0 and less than 1"
    return None


def checkpoint_weights(folder: Path, adapter: Adapter, model: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint in peft's format. Raises ValueError where it is not of such an adapter."""
    from ringmaster.techniques.models.adapters import pretrained_state

    stored = read_adapter(folder)
    if (stored.rank, stored.scaling) != (adapter.rank, adapter.scaling):
        raise ValueError(
            f"adapter: the one in {folder.name} has rank {stored.rank} and scale {stored.scaling:g}, and this one "
            f"{adapter.rank} and {adapter.scaling:g}. To fix: load it into an adapter of its rank"
        )
    at = sites(model, adapter)
    with torch.device("meta"):
        first = first_state(model, adapter, at, seed=0)
    return pretrained_state(folder, first)
