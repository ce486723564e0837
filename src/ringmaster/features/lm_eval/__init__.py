"""Tasks of EleutherAI's lm-evaluation-harness as metrics, by names such as `lm-eval/TASK`."""

METRIC_FAMILIES = {"lm-eval": "ringmaster.features.lm_eval.lm_eval_tasks:lm_eval_metric"}
