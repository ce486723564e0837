"""A pool at work: its executor, its nodes and their runs in Prefect, and what follows where one of them is gone."""
