"""Blocks that a worker keeps beside its KV cache, on a disk or in host memory."""
