"""Fused groups, which are jobs that one gang trains together: possible groups, and the choice among them."""
