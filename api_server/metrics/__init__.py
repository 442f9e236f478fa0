"""The figures of /metrics."""
