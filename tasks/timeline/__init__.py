"""The timeline of a run: its planned, past, running and future segments, read from the database and drawn."""
