"""Profiles of groups of jobs that are trained together on one base model: few are measured, the rest predicted."""
