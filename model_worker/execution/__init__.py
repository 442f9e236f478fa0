"""The ways to run a step."""
