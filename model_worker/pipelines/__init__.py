"""Pipelines for use within one process, on the same engine as the worker's loop."""
