"""A daemon keeps the servers that a command of a terminal has started, so that the next one starts at once."""
