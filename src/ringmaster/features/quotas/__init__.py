"""Quotas of users: what the jobs of a user may hold at a time, in one batch, or in all batches of a pool.

The planner knows them as limits of the groups of a problem's jobs (`Problem.quotas`).
"""
