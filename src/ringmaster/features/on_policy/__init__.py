"""Losses of completions that the model in training writes itself: from their rewards, or from a teacher's outputs."""

LOSSES = {
    "grpo": "ringmaster.features.on_policy.grpo:Grpo",
    "on-policy-distillation": "ringmaster.features.on_policy.distillation:OnPolicyDistillation",
}
DATA_SOURCES = {"prompt": "ringmaster.features.on_policy.prompts:Prompt"}
METRICS = {"reward": "ringmaster.features.on_policy.metrics:Reward"}
