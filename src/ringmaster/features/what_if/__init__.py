"""What a change of a problem gains: more devices, fewer jobs; and whether all jobs can end in time."""
