"""Names for the content of KV blocks: a chain of hashes. Equal names mean equal tokens from the sequence's start.

The content of a block depends on every token before it, and on whatever else shapes the hidden states. Images, whose
tokens are all alike, enter by their own hashes; everything else (an adapter) enters by the salt. The scheme is that of
vLLM's prefix caching.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from interfaces import ImageMetadata

_DIGEST_BYTES = 16


def extend_hashes(
    hashes: list[bytes], tokens: NDArray[np.int64], block_size: int, salt: str, images: Sequence[ImageMetadata] = ()
) -> None:
    """Append the digests of the full blocks of `tokens` that `hashes` does not have yet."""
    parent = hashes[-1] if hashes else blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        end = start + block_size
        content = tokens[start:end].tobytes()
        for image in images:
            if image.start_idx < end and start < image.end_idx:
                content += _name(image)
        parent = blake2b(parent + content, digest_size=_DIGEST_BYTES).digest()
        hashes.append(parent)


def _name(image: ImageMetadata) -> bytes:
    """The image's content and position. An image whose content has no hash equals no other."""
    content = os.urandom(_DIGEST_BYTES) if image.image_hash is None else str(image.image_hash).encode()
    return b"image %s %d" % (content, image.start_idx)
