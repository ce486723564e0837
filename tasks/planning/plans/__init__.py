"""Plans: the data classes, their verification, and the improvement and reuse of given plans."""
