"""The engine `slurm`, whose nodes are jobs of Slurm."""
