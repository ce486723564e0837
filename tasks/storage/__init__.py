"""Storage in databases: the database of a batch or a pool, its tables, and the journal of a batch."""
