"""What the executor, the nodes and the batches of a pool share: one database, and the words that they leave in it."""
