"""A Python of a job's own: made from a lock file by uv, or one that exists."""
