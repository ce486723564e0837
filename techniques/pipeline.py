"""Pipeline parallelism: consecutive layers on consecutive devices, micro-batches streaming through them.

Sources: Huang et al., GPipe (arXiv:1811.06965); Narayanan et al., 1F1B and its interleaved form (arXiv:2104.04473); Qi
et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.decoders import why_unknown
from ringmaster.techniques.job import DISTILLED, PRUNED, Job
from ringmaster.techniques.technique import (
    RECOMPUTE,
    Config,
    GangShape,
    StepWork,
    Technique,
    no_prefix,
    training_state_bytes,
    undivided_batch_only,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from ringmaster.techniques.engine.models import ModelFacts
    from ringmaster.techniques.engine.pipe import Pipe

# The quickest-looking first, and how many stages a device has under each.
QUICKEST = "1f1b"
STAGES_A_DEVICE = {QUICKEST: 1, "zero_bubble": 2, "interleaved": 2, "gpipe": 1}


class Pipeline(Technique):
    """Each device holds some of the layers; hidden states go forward from one to the next, gradients back."""

    name = "pipeline"
    summary = "consecutive layers on consecutive devices, micro-batches streaming through"
    moves_model = True
    divides_layers = True
    needs = "two devices or more, a layer for each; 1/n of the training state in each device's memory; loosely linked"
    adaptations = frozenset({DISTILLED, PRUNED})

    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """Needs a known model, a layer for each device, and a micro-batch for each."""
        if gang.num_devices < 2:
            return "needs two devices or more"
        if reason := no_prefix(job) or why_unknown(facts.decoder):
            return reason
        if facts.num_layers < gang.num_devices:
            return f"{facts.num_layers} layers are too few for {gang.num_devices} devices"
        if job.global_batch_size < gang.num_devices:
            return (
                f"global_batch_size {job.global_batch_size} makes no micro-batch for each of {gang.num_devices} devices"
            )
        return undivided_batch_only(job, facts)

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """With n devices and m micro-batches a share of (n - 1) / (m + n - 1) of the time is idle (GPipe, section 2):
        so first four micro-batches a device, then two, then one, which are larger; of other schedules only the first.
        """
        rows, num = job.global_batch_size, gang.num_devices
        counts = micro_batch_counts(rows, num)
        for recompute in RECOMPUTE:
            for schedule, stages_a_device in STAGES_A_DEVICE.items():
                if facts.num_layers < stages_a_device * num:
                    continue
                # Zero bubble goes backward twice, and what is kept selectively can be asked for once.
                if recompute == "selective" and schedule == "zero_bubble":
                    continue
                # The interleaved schedule goes in rounds of as many micro-batches as there are devices, or a few more.
                possible = [count for count in counts if schedule != "interleaved" or count % (count // num) == 0]
                for count in possible if schedule == QUICKEST else possible[:1]:
                    yield {"micro_batch": rows // count, "recompute": recompute, "schedule": schedule}

    def mesh_shape(self, gang: GangShape, config: Config) -> dict[str, int]:
        """One axis, along which the layers are divided."""
        return {"pp": gang.num_devices}

    def num_stages(self, gang: GangShape, config: Config) -> int:
        """One or two a device."""
        return STAGES_A_DEVICE[config["schedule"]] * gang.num_devices

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """The state of the largest stage: its layers, and the embedding, which is at the first or the last."""
        assert facts.decoder is not None
        embedding = facts.decoder.vocab_size * facts.decoder.hidden_size
        outside = embedding if facts.decoder.is_tied else 2 * embedding
        of_layers = (facts.num_parameters - outside) / facts.num_parameters / gang.num_devices
        return int(training_state_bytes(job, facts) * max(of_layers, embedding / facts.num_parameters))

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """The stages of this rank; what belongs to others is let go."""
        from ringmaster.techniques.engine.recomputation import recompute_layers

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
        """`model` along the mesh's pp axis, `config["stage_layers"]` layers a stage where that is given; `lay_out` is
        called on each stage of this rank, which keeps its class.
        """
        import torch

        from ringmaster.techniques.engine.pipe import Pipe

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
        )
        self._tied_replica = pipe.tied_replica
        replicas = [name for name, p in pipe.whole.named_parameters() if p is self._tied_replica]
        self._tied_name = replicas[0] if replicas else None
        return pipe

    def forward_backward(self, model: nn.Module, work: StepWork) -> tuple[Tensor, float]:
        """By the schedule; the loss is the last stage's."""
        pipe: Pipe = model  # type: ignore[assignment]
        return pipe.forward_backward(work)

    def forward(self, model: nn.Module, batch: dict[str, Tensor], work: StepWork) -> Any:
        """The output on the rank of the last stage, None on others."""
        from transformers.modeling_outputs import CausalLMOutput

        logits = model(batch["input_ids"], precision=work.autocast)
        return None if logits is None else CausalLMOutput(logits=logits)

    def loss_replicas(self, mesh: DeviceMesh | None) -> int:
        """Only the last stage reports a loss."""
        return 1

    def grad_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Over all stages; a weight that two of them hold counts once."""
        import torch.distributed as dist

        from ringmaster.techniques.engine.gradients import global_norm

        square = global_norm([p for p in parameters if p is not self._tied_replica]) ** 2
        dist.all_reduce(square, group=self._group)
        return square.sqrt()

    def writes(self, name: str, tensor: Tensor, *, rank: int) -> bool:
        """Each rank what it holds; a weight that two of them hold, the first stage."""
        return self._tied_name is None or name.split("/")[1] != self._tied_name

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model with all that this rank holds."""
        return model.whole  # type: ignore[return-value]


def micro_batch_counts(rows: int, num_stages: int) -> list[int]:
    """Into how many equal micro-batches to divide rows: four a stage or more, two or more, one or more."""
    divisors = [count for count in range(num_stages, rows + 1) if rows % count == 0]
    counts = [next((m for m in divisors if m >= times * num_stages), divisors[-1]) for times in (4, 2, 1)]
    return list(dict.fromkeys(counts))
