"""The engine `slurm`, whose nodes are jobs of Slurm."""

ENGINES = {"slurm": "ringmaster.features.slurm.slurm_engine:SlurmOptions"}
