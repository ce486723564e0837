"""What stays after a command of a terminal, without the processes of a real run."""
