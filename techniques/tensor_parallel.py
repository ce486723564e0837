"""Tensor parallelism with sequence parallelism: every layer's matrices are divided over the devices.

Sources: Shoeybi et al., Megatron-LM (arXiv:1909.08053); Korthikanti et al., Reducing Activation Recomputation in Large
Transformer Models (arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.job import DISTILLED, PRUNED, Job
from ringmaster.techniques.technique import (
    RECOMPUTE,
    Config,
    GangShape,
    StepWork,
    Technique,
    micro_batches,
    no_prefix,
    training_state_bytes,
    undivided_batch_only,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from ringmaster.techniques.model_facts import Decoder, LayerModule, ModelFacts

# The linear modules of a Llama-like layer; norms come on top.
NEEDED = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"})
# torch 2.13 silently loses gradients of compiled layers whose activations are whole on every rank.
COMPILED_BY_SEQUENCE = "compiled layers are divided with their activations along the sequence"
KNOWN = NEEDED | {"gate_proj"}


class TensorParallel(Technique):
    """Divides attention by heads, feed-forward by features, embedding and head by the vocabulary; not the batch."""

    name = "tensor"
    summary = "every layer's matrices divided; activations exchanged twice a layer"
    needs = "two devices or more, closely linked; a model of Llama's kind whose heads can be divided; 1/n of its state"
    adaptations = frozenset({DISTILLED, PRUNED})
    whole_layers = False
    whole_tensors = True

    moves_model = True

    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """Requires two devices, no dropout, and a model whose layers the technique can divide."""
        if gang.num_devices < 2:
            return "needs two devices or more"
        if facts.has_dropout:
            return "the model drops out, and ranks that hold different heads would draw the same mask"
        if reason := no_prefix(job) or why_not_divisible(facts.decoder, gang.num_devices):
            return reason
        assert facts.decoder is not None
        if job.compile and facts.decoder.seq_len % gang.num_devices:
            return f"{COMPILED_BY_SEQUENCE}, and {facts.decoder.seq_len} tokens make no {gang.num_devices} equal parts"
        return None

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """Yields configs with sequence parallelism first, where the tokens can be divided.

        Sequence parallelism divides the activations between the matrices too.
        """
        assert facts.decoder is not None
        sequence = (True, False) if facts.decoder.seq_len % gang.num_devices == 0 else (False,)
        if job.compile:
            sequence = (True,)
        sizes = micro_batches(job, at_most=1 if undivided_batch_only(job, facts) else 3)
        for recompute, by_sequence, micro_batch in product(RECOMPUTE, sequence, sizes):
            yield {
                "micro_batch": micro_batch,
                "recompute": recompute,
                "sequence_parallel": by_sequence,
                # A user's loss may apply operations to the logits that divided logits do not support.
                "loss_parallel": job.loss is None,
            }

    def mesh_shape(self, gang: GangShape, config: Config) -> dict[str, int]:
        """Returns one axis, over which every matrix is divided."""
        return {"tp": gang.num_devices}

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Returns the bytes of a share of the training state; norms, which are not divided, are too small to count."""
        return training_state_bytes(job, facts) // gang.num_devices

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """Divides the model in place; each rank takes its part of the weights, which all ranks have built alike."""
        from ringmaster.techniques.sharding.tensor_plan import cut
        from ringmaster.techniques.training.recomputation import recompute_layers

        assert mesh is not None
        recompute_layers(model, config["recompute"])
        self._loss_parallel: bool = config["loss_parallel"]
        cut(model, mesh["tp"], sequence_parallel=config["sequence_parallel"], loss_parallel=self._loss_parallel)
        return model.to(mesh.device_type)

    def forward(self, model: nn.Module, batch: dict[str, Tensor], work: StepWork) -> Any:
        """Gathers the divided logits in evaluation; in training the loss takes them divided."""
        from ringmaster.techniques.training.gradients import whole

        output = super().forward(model, batch, work)
        if not model.training:
            output.logits = whole(output.logits)
        return output

    def accumulate(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """Enables the cross entropy of logits that are divided over the vocabulary, for the loss and its backward."""
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel() if self._loss_parallel else nullcontext()

    def forward_backward(self, model: nn.Module, work: StepWork) -> tuple[Tensor, float]:
        """Runs the default step; partial gradients of ranks (norms, shared heads) are summed once a step."""
        from ringmaster.techniques.training.gradients import settle_, whole

        loss_sum, count = super().forward_backward(model, work)
        settle_(model.parameters())
        return whole(loss_sum), count


def why_not_divisible(decoder: Decoder | None, size: int) -> str | None:
    """Returns why a model's layers cannot be divided over `size` devices, or None."""
    if decoder is None:
        return "is for causal language models of texts alone with attention layers, such as Llama"
    modules = {module.name.rpartition(".")[2] for module in decoder.modules}
    if foreign := [module for module in decoder.modules if not _is_known(module, decoder)]:
        return f"does not know how to divide {foreign[0].name} ({foreign[0].kind}) of {decoder.architecture}"
    if missing := sorted(NEEDED - modules):
        return f"finds no {missing[0]} in the layers of {decoder.architecture}"
    if decoder.num_heads % size:
        return f"{decoder.num_heads} attention heads cannot be divided by {size} devices"
    if decoder.num_kv_heads % size and size % decoder.num_kv_heads:
        return f"{decoder.num_kv_heads} heads of keys and values cannot be divided by {size} devices"
    features = next(module.shape[0] for module in decoder.modules if module.name.endswith("up_proj"))
    if features % size:
        return f"{features} features of the feed-forward layers cannot be divided by {size} devices"
    return None


def _is_known(module: LayerModule, decoder: Decoder) -> bool:
    last = module.name.rpartition(".")[2]
    if last in ("q_norm", "k_norm"):  # supported where each head is normalized separately
        return module.shape == (decoder.head_dim,)
    return (last in KNOWN and module.kind == "Linear") or module.kind.endswith("Norm")
