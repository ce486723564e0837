"""What a change of the problem would gain: more devices, a job less, a deadline for all. `docs/planning.md` has the formula."""
