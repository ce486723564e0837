"""Metrics of whole rows of tokens: exact match, ROUGE and entities."""

METRICS = {
    "entity_f1": "ringmaster.features.sequence_metrics.token_sequences:EntityF1",
    "entity_precision": "ringmaster.features.sequence_metrics.token_sequences:EntityPrecision",
    "entity_recall": "ringmaster.features.sequence_metrics.token_sequences:EntityRecall",
    "exact_match": "ringmaster.features.sequence_metrics.token_sequences:ExactMatch",
    "rouge_l": "ringmaster.features.sequence_metrics.token_sequences:RougeL",
    "generated_exact_match": "ringmaster.features.sequence_metrics.token_sequences:GeneratedExactMatch",
    "generated_rouge_1": "ringmaster.features.sequence_metrics.token_sequences:GeneratedRouge1",
    "generated_rouge_2": "ringmaster.features.sequence_metrics.token_sequences:GeneratedRouge2",
    "generated_rouge_l": "ringmaster.features.sequence_metrics.token_sequences:GeneratedRougeL",
}
