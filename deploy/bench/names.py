"""Words of the command line that flags and figures share."""

from __future__ import annotations

from shared.settings_sources import ENV_PREFIX

# The environment variable with the key of the server that a command talks to.
KEY_VARIABLE = ENV_PREFIX + "API_KEY"

# Datasets that are not files.
RANDOM = "random"
PREFIX = "prefix"
# Times that --goodput may limit.
LIMITS = ("ttft", "tpot", "itl", "e2el")
