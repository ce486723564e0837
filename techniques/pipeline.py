"""Pipeline parallelism: consecutive layers on consecutive devices, through which micro-batches stream.

Sources: Huang et al., GPipe (arXiv:1811.06965); Narayanan et al., 1F1B and its interleaved form (arXiv:2104.04473); Qi
et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.job import DISTILLED, PRUNED, Job
from ringmaster.techniques.model_facts import ModelFacts, why_positions_lost, why_unknown
from ringmaster.techniques.technique import (
    CONSECUTIVE,
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

    from ringmaster.techniques.sharding.pipe import Pipe

# Schedules, the presumably quickest first, and how many stages a device has under each.
QUICKEST = "1f1b"
STAGES_A_DEVICE = {QUICKEST: 1, "zero_bubble": 2, "interleaved": 2, "gpipe": 1}


class Pipeline(Technique):
    """Places some of the layers on each device. Hidden states are sent forward to the next device, gradients back."""

    name = "pipeline"
    summary = "consecutive layers on consecutive devices, micro-batches streaming through"
    moves_model = True
    divides_layers = True
    needs = "two devices or more, a layer for each; 1/n of the training state in each device's memory; loosely linked"
    adaptations = frozenset({DISTILLED, PRUNED})
    whole_tensors = True
    takes_chunks = CONSECUTIVE

    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """Requires a decoder of a known architecture, and a layer and a micro-batch for each device."""
        if gang.num_devices < 2:
            return "needs two devices or more"
        if reason := no_prefix(job) or why_unknown(facts.decoder) or why_positions_lost(facts.decoder):
            return reason
        if facts.num_layers < gang.num_devices:
            return f"{facts.num_layers} layers are too few for {gang.num_devices} devices"
        if job.global_batch_size < gang.num_devices:
            return (
                f"global_batch_size {job.global_batch_size} makes no micro-batch for each of {gang.num_devices} devices"
            )
        return undivided_batch_only(job, facts)

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """Yields four micro-batches a device first, then two, then one.

        With n devices and m micro-batches, a share of (n - 1) / (m + n - 1) of the time is idle (GPipe, section 2).
        Fewer micro-batches are larger. Schedules other than `QUICKEST` get the first count only.
        """
        rows, num = job.global_batch_size, gang.num_devices
        counts = [rows // micro_batches(job)[0]] if job.is_exact else micro_batch_counts(rows, num)
        for recompute in RECOMPUTE:
            for schedule, stages_a_device in STAGES_A_DEVICE.items():
                if facts.num_layers < stages_a_device * num:
                    continue
                if job.is_exact and schedule == "zero_bubble":  # it computes the halves of a backward apart
                    continue
                # Zero bubble runs backward twice, and selective checkpointing allows one read of each stored tensor.
                if recompute == "selective" and schedule == "zero_bubble":
                    continue
                # The interleaved schedule runs in rounds of as many micro-batches as there are devices, or a few more.
                possible = [count for count in counts if schedule != "interleaved" or count % (count // num) == 0]
                for count in possible if schedule == QUICKEST else possible[:1]:
                    yield {"micro_batch": rows // count, "recompute": recompute, "schedule": schedule}

    def mesh_shape(self, gang: GangShape, config: Config) -> dict[str, int]:
        """Returns one axis, along which the layers are divided."""
        return {"pp": gang.num_devices}

    def num_stages(self, gang: GangShape, config: Config) -> int:
        """Returns one or two stages a device, depending on the schedule."""
        return STAGES_A_DEVICE[config["schedule"]] * gang.num_devices

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Returns the bytes of the largest stage's state.

        A stage holds its share of the layers; the first or last one holds the embedding.
        """
        assert facts.decoder is not None
        embedding = facts.decoder.vocab_size * facts.decoder.hidden_size
        outside = embedding if facts.decoder.is_tied else 2 * embedding
        of_layers = (facts.num_parameters - outside) / facts.num_parameters / gang.num_devices
        return int(training_state_bytes(job, facts) * max(of_layers, embedding / facts.num_parameters))

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """Returns the stages of this rank, and frees the other stages' parameters."""
        from ringmaster.techniques.training.recomputation import recompute_layers

        def lay_out(stage: nn.Module) -> nn.Module:
            recompute_layers(stage, config["recompute"])
            return stage

        assert mesh is not None
        return self.cut(model, mesh, config, schedule=config["schedule"], lay_out=lay_out)

    def cut(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        config: Config,
        *,
        schedule: str,
        lay_out: Callable[[nn.Module], nn.Module],
    ) -> nn.Module:
        """Cuts `model` into stages along the mesh's pp axis, and returns the pipe of this rank's stages.

        `config["stage_layers"]` gives the number of layers of each stage, where present. `lay_out` is called on each
        stage of
        this rank, and must keep the stage's class.
        """
        import torch

        from ringmaster.techniques.sharding.pipe import Pipe

        self._group = mesh.get_group("pp")
        hidden_dtype = torch.bfloat16 if self.precision == "bf16-params" else torch.float32
        pipe = Pipe(
            model,
            self._group,
            mesh.device_type,
            schedule=schedule,
            lay_out=lay_out,
            hidden_dtype=hidden_dtype,
            stage_layers=config.get("stage_layers"),
            exact=self.exact,
        )
        self._tied_replica = pipe.tied_replica
        replicas = [name for name, p in pipe.whole.named_parameters() if p is self._tied_replica]
        self._tied_name = replicas[0] if replicas else None
        return pipe

    def forward_backward(self, model: nn.Module, work: StepWork) -> tuple[Tensor, float]:
        """Runs the micro-batches by the schedule; returns the loss of the last stage."""
        pipe: Pipe = model  # type: ignore[assignment]
        return pipe.forward_backward(work)

    def forward(self, model: nn.Module, batch: dict[str, Tensor], work: StepWork) -> Any:
        """Returns the output on the rank of the last stage, and None on the others."""
        from transformers.modeling_outputs import CausalLMOutput

        logits = model(work.inputs(batch)["input_ids"], precision=work.autocast)
        return None if logits is None else CausalLMOutput(logits=logits)

    def loss_replicas(self, mesh: DeviceMesh | None) -> int:
        """Returns 1, as only the last stage reports a loss."""
        return 1

    def grad_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Returns the norm over all stages; a weight that two stages hold counts once."""
        from ringmaster.techniques.training.gradients import global_norm

        counted = [p for p in parameters if p is not self._tied_replica]
        return global_norm(counted, group=self._group, exact=self.exact)

    def writes(self, name: str, tensor: Tensor, *, rank: int) -> bool:
        """Returns True for what this rank holds, except for the second copy of a weight that two stages hold."""
        return self._tied_name is None or name.split("/")[1] != self._tied_name

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Returns the model with all parameters that this rank holds."""
        return model.whole  # type: ignore[return-value]


def micro_batch_counts(rows: int, num_stages: int) -> list[int]:
    """Returns the numbers of equal micro-batches to try: at least four, two and one a stage, without duplicates."""
    divisors = [count for count in range(num_stages, rows + 1) if rows % count == 0]
    counts = [next((m for m in divisors if m >= times * num_stages), divisors[-1]) for times in (4, 2, 1)]
    return list(dict.fromkeys(counts))
