"""The published names of pipelines."""
