"""Rules between losses of the model's own completions and their data, in batch files."""

from collections.abc import Iterator

from ringmaster.features.on_policy.loss import OnPolicyLoss
from ringmaster.features.on_policy.prompts import Prompt
from ringmaster.findings import Finding, Raw, as_mapping
from ringmaster.tasks.batch.file_hooks import BatchFileHook
from ringmaster.tasks.batch.references import split_loss
from ringmaster.techniques.loss import loss_class, loss_names


class PromptsInFiles(BatchFileHook):
    """Prompts go with losses that read prompts."""

    def job_findings(self, job: Raw) -> Iterator[Finding]:
        """Yields prompts without a loss, and other data of a loss that reads prompts."""
        place, reads_prompts = ("data", "kind"), as_mapping(job.get("data")).get("kind") == Prompt.name
        name, _ = split_loss(job.get("loss"))
        if job.get("loss") is None and reads_prompts:
            remedy = "set loss: {name: grpo, rewards: [...]}, or give data with answers"
            yield Finding(place, "prompt has no answers to learn", remedy)
        loss = loss_class(name) if isinstance(name, str) and name in loss_names() else None
        if loss is not None and issubclass(loss, OnPolicyLoss) and not reads_prompts:
            yield Finding(place, f"is not prompt, and the loss {name} reads prompts", "set kind: prompt")


BATCH_FILE_HOOKS = (PromptsInFiles(),)
