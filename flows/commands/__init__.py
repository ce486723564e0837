"""The commands of `ringmaster`, a file for each kind of question or deed."""
