"""The command `ringmaster techniques`: the list of techniques, and which of them could train the jobs of a file."""
