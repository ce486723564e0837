"""`warm_start`: jobs that continue from a checkpoint of another job."""
