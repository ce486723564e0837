"""`store`: jobs that make knowledge stores, which samples of other jobs read."""
