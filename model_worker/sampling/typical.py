"""Typical decoding (Meister et al.): keep the tokens whose information is closest to the entropy of the distribution.

It comes after the other truncations and looks at what they kept, renormalised. Tokens are ranked by how far their
surprise, -log p, is from the entropy; the shortest prefix of that order whose probability reaches typical_p is kept,
at least one token, and tokens equal to the last one as well, so that no order among equals matters. Knows logits only.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def only_typical(logits: torch.Tensor, typical_p: NDArray[np.float64]) -> torch.Tensor:
    """Put -inf on tokens that typical-p drops, in `logits` [R, vocab]; the largest is shifted to 0 again.

    Tokens that are -inf already stay so; each row has others.
    """
    logprobs = torch.log_softmax(logits.double(), -1)
    probabilities = logprobs.exp()
    shares = torch.where(probabilities > 0, probabilities * logprobs, 0.0)
    # Each row by itself: torch adds up a single row in another order than several.
    entropy = -torch.stack([row.sum(-1, keepdim=True) for row in shares])
    distance = (-logprobs - entropy).abs()
    ordered, index = torch.sort(distance, dim=-1)
    reached = probabilities.gather(1, index).cumsum(-1)
    target = torch.from_numpy(typical_p).to(logits.device)[:, None]
    # Rounding may leave the sum short of the target: then every token that has a probability is needed.
    last = (reached < target).sum(-1, keepdim=True).minimum((probabilities > 0).sum(-1, keepdim=True) - 1)
    kept = (distance <= ordered.gather(1, last)) & (probabilities > 0)
    masked = torch.where(kept, logits, -torch.inf)
    return masked - masked.max(dim=-1, keepdim=True).values
