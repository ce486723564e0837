"""`components`: named parts of a model, which the lineage recognizes."""
