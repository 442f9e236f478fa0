"""Requests: content, sampling values, constraints."""
