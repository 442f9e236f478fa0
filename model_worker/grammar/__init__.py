"""Constrained rows: their token masks."""
