"""Results of requests."""
