"""The process of a command: its signals, its log, and the permissions of the files that it writes."""
