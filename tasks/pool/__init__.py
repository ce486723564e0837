"""State that a pool's controller, nodes and batches share: one database, and the messages that they leave in it."""
