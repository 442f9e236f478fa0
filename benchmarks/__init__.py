"""A closed-loop load generator for any OpenAI-compatible server: `python -m benchmarks --help`."""
