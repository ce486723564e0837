"""Model assertions, and the logs and groups of rows that they are checked on."""
