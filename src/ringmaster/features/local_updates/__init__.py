"""`local_updates`: workers that take optimizer steps on their own between exchanges."""
