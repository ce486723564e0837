"""`components`: named parts of a model, which the lineage recognizes."""

DATA_SOURCES = {"composite": "ringmaster.features.composition.data:CompositeData"}
