"""Prefect's worker for work pools of type `slurm`, in which each flow run is a batch job of Slurm."""
