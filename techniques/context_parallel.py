"""Context parallelism: every sequence is divided over the devices, for sequences that are too long for one device.

Sources: Jacobs et al., DeepSpeed Ulysses (arXiv:2309.14509); Llama Team, The Llama 3 Herd of Models (arXiv:2407.21783),
section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import product
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.ddp import Ddp
from ringmaster.techniques.fsdp import Fsdp
from ringmaster.techniques.job import Job
from ringmaster.techniques.loss import loss_class
from ringmaster.techniques.metric import why_not_divided
from ringmaster.techniques.model_facts import ModelFacts, why_positions_lost, why_unknown
from ringmaster.techniques.technique import (
    RECOMPUTE,
    Config,
    GangShape,
    Technique,
    micro_batches,
    no_prefix,
    training_state_bytes,
    undivided_batch_only,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh


class ContextParallel(Technique):
    """Each device computes some tokens of every sequence; only attention reads the tokens of other devices.

    Weights are replicated (as under `ddp`) or sharded (as under `fsdp`) over the same devices, and their gradients are
    averaged in the same way.
    """

    name = "context"
    summary = "every sequence divided over the devices; attention exchanges heads, or keys and values"
    needs = "two devices or more, closely linked; a causal language model whose sequences can be divided"

    moves_model = True
    whole_tensors = True

    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """Requires two devices, a decoder of a known architecture with its own loss, and tokens that divide evenly."""
        if gang.num_devices < 2:
            return "needs two devices or more"
        if reason := no_prefix(job) or why_unknown(facts.decoder) or why_positions_lost(facts.decoder):
            return reason
        assert facts.decoder is not None
        if job.model.attention not in ("auto", "sdpa"):
            return f"attention: {job.model.attention} knows no tokens of other devices; sdpa does"
        loss = loss_class(job.loss)
        if job.loss is not None and (loss is None or not loss.per_token):
            if loss is not None:
                return f"the loss {loss.name} reads whole sequences, and here each rank has some tokens of them"
            return "a loss of one's own looks at whole sequences"
        if facts.decoder.seq_len % (2 * gang.num_devices):
            return f"{facts.decoder.seq_len} tokens make no {2 * gang.num_devices} equal chunks, two for each device"
        if facts.has_dropout:
            return "the model drops out, by masks of whole sequences, and here each rank has some tokens of them"
        return why_not_divided(job.evaluation.metrics) or undivided_batch_only(job, facts)

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """Yields configs with the "ulysses" exchange first where the number of heads allows it.

        Exchanging heads sends less than gathering keys and values.
        """
        assert facts.decoder is not None
        exchanges = ["all_gather"]
        if facts.decoder.num_heads % gang.num_devices == 0 and facts.decoder.num_kv_heads % gang.num_devices == 0:
            exchanges.insert(0, "ulysses")
        for recompute, sharded, exchange in product(RECOMPUTE, (False, True), exchanges):
            if recompute == "selective" and exchange == "all_gather":  # its masks are not among the stored tensors
                continue
            # The number of micro-batches hardly affects which exchange is quicker, so it varies for one exchange only.
            for micro_batch in micro_batches(job, at_most=2 if exchange == exchanges[0] else 1):
                yield {"micro_batch": micro_batch, "recompute": recompute, "exchange": exchange, "sharded": sharded}

    def mesh_shape(self, gang: GangShape, config: Config) -> dict[str, int]:
        """Returns one axis, over which sequences are divided."""
        return {"cp": gang.num_devices}

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Returns the bytes of the whole training state, or the memory of `fsdp` where the state is sharded."""
        if config["sharded"]:
            return Fsdp().estimate_memory(job, gang, {**config, "reshard": True}, facts)
        return training_state_bytes(job, facts)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """Replaces attention by attention across the devices, then lays out the weights over them."""
        from ringmaster.techniques.sharding.sequences import attend_across

        assert mesh is not None
        self._mesh, self._exchange = mesh["cp"], config["exchange"]
        attend_across(model, self._mesh.get_group(), exchange=self._exchange)
        self._weights: Technique = Fsdp() if config["sharded"] else Ddp()
        self._weights.precision, self._weights.communication = self.precision, self.communication
        if not self._weights.moves_model:
            model.to(mesh.device_type)
        return self._weights.parallelize(model, self._mesh, {**config, "reshard": True})

    def width_divisor(self, mesh: DeviceMesh | None) -> int:
        """Returns two chunks for each rank."""
        assert mesh is not None
        return 2 * mesh.size()

    def part(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns this rank's tokens, their positions, and the token that follows each of them as its label."""
        from ringmaster.techniques.sharding.sequences import positions
        from ringmaster.techniques.training.bound_loss import next_tokens

        tokens = batch["input_ids"]
        rank, size = self._mesh.get_local_rank(), self._mesh.size()
        at = positions(rank, size, tokens.shape[1], exchange=self._exchange)
        return {
            "input_ids": tokens[:, at],
            "position_ids": at.expand(len(tokens), -1),
            "shift_labels": next_tokens(batch)[:, at],
        }

    def loss_replicas(self, mesh: DeviceMesh | None) -> int:
        """Returns 1, as each rank reports the loss of its own tokens."""
        return 1

    def gradient_divisor(self, mesh: DeviceMesh | None) -> int:
        """Returns the number of ranks, as the exchange averages over all of them.

        The batch itself is not divided over the ranks.
        """
        assert mesh is not None
        return mesh.size()

    def accumulate(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """Returns the context of the technique that lays out the weights."""
        return self._weights.accumulate(model, is_last=is_last)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Returns the module that the technique that lays out the weights unwraps."""
        return self._weights.unwrap(model)
