"""Data sets by name and version: the catalogue, their fingerprints, what is wrong with them, and how they are recorded.

Loading stays with the jobs: `ringmaster.techniques.engine.data`.
"""
