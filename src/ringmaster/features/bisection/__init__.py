"""The command `ringmaster lineage bisect`: the search for the adaptation that broke a model."""
