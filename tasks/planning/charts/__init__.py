"""Gantt charts of plans, as SVG and as text."""
