"""`local_updates`: workers that take optimizer steps on their own between exchanges."""

TECHNIQUES = {"local": "ringmaster.features.local_updates.technique:Local"}
