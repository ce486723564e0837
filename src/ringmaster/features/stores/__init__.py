"""`store`: jobs that make knowledge stores, which samples of other jobs read."""

TECHNIQUES = {"encode": "ringmaster.features.stores.technique:Encode"}
DATA_SOURCES = {
    "rag": "ringmaster.features.stores.passage_answers:Rag",
    "passages": "ringmaster.features.stores.passages:Passages",
}
LOSSES = {"rag-sequence": "ringmaster.features.stores.passage_answers:RagSequence"}
