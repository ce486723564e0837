"""Trainers of users: commands that report their progress, and unedited scripts that are adopted."""

TECHNIQUES = {"command": "ringmaster.features.external_trainers.technique:Command"}
