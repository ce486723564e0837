"""`allow_untrusted`: the chain of a job's states, by which the work of untrusted nodes is verified."""
