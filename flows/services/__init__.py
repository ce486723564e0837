"""The servers of a pool and the processes beside them: their start, supervision, passwords, files and end."""
