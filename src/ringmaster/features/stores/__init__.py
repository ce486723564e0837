"""`store`: jobs that make knowledge stores, which samples of other jobs read."""

TECHNIQUES = {"encode": "ringmaster.features.stores.technique:Encode"}
DATA_SOURCES = {"passages": "ringmaster.features.stores.passages:Passages"}
