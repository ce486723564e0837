"""Trainers of users: commands that report their progress, and unedited scripts that are adopted."""
