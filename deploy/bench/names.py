"""Words of the command line that flags and figures share."""

from __future__ import annotations

# Datasets that are not files.
RANDOM = "random"
PREFIX = "prefix"
# Times that --goodput may limit.
LIMITS = ("ttft", "tpot", "itl", "e2el")
