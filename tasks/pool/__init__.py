"""State that a pool's executor, nodes and batches share: one database, and the messages that they leave in it."""
