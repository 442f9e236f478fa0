"""The error of an adapter that cannot be used.

Knows words only.
"""

from __future__ import annotations

# What helps with an adapter that does more than adding low-rank products.
MERGE = "merge it into its model with peft's merge_and_unload, and serve the result as a model"


class AdapterRefused(ValueError):
    """This adapter cannot be used. The message names the file or the tensor, the reason and the remedy."""
