"""The engine `pbs`, whose nodes are jobs of OpenPBS or PBS Professional."""
