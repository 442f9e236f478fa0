"""Names for the content of KV blocks: a chain of hashes, so that equal names mean equal tokens from the sequence's
start.

The content of a block depends on every token before it and on what else shapes the hidden states (adapter, images),
which the salt stands for; vLLM's prefix caching introduced the scheme.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_DIGEST_BYTES = 16


def extend_hashes(hashes: list[bytes], tokens: NDArray[np.int64], block_size: int, salt: str) -> None:
    """Appends the digests of the full blocks of `tokens` that `hashes` does not have yet."""
    parent = hashes[-1] if hashes else blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        block = tokens[start : start + block_size].tobytes()
        parent = blake2b(parent + block, digest_size=_DIGEST_BYTES).digest()
        hashes.append(parent)
