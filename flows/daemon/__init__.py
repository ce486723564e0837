"""What stays after a command of a terminal, so that the next one starts at once."""
