"""`warm_start`: jobs that go on from a checkpoint of another job."""
