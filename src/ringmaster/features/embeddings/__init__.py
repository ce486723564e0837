"""Embedding models: contrastive losses, pairs of texts, metrics of retrieval, and mined hard negatives."""

LOSSES = {
    "contrastive": "ringmaster.features.embeddings.contrastive:Contrastive",
    "late-interaction": "ringmaster.features.embeddings.contrastive:LateInteraction",
}
METRICS = {
    "hit_at_1": "ringmaster.features.embeddings.retrieval_metrics:HitAt1",
    "hit_at_5": "ringmaster.features.embeddings.retrieval_metrics:HitAt5",
    "mrr": "ringmaster.features.embeddings.retrieval_metrics:MeanReciprocalRank",
    "recall_at_1": "ringmaster.features.embeddings.retrieval_metrics:RecallAt1",
    "recall_at_5": "ringmaster.features.embeddings.retrieval_metrics:RecallAt5",
}
DATA_SOURCES = {"embedding": "ringmaster.features.embeddings.embedding_rows:Embedding"}
