"""Data sets by name and version: catalogue, fingerprints, validation and recording.

Loading belongs to the jobs: `ringmaster.techniques.data`.
"""
