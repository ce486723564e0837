"""Homes and pools that earlier releases made."""
