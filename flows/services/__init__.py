"""The servers of a pool and their companion processes: their start, supervision, passwords, files and end."""
