"""The engine `pbs`, whose nodes are jobs of OpenPBS or PBS Professional."""

ENGINES = {"pbs": "ringmaster.features.pbs.pbs_engine:PbsOptions"}
