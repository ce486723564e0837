"""The lineage as a graph of models and adaptations, with its queries and its maintenance."""
