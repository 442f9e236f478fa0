"""Draws guesses from the logits of a model that guesses, as the worker would draw tokens from its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from model_worker.sampling.sampler import SamplerRows, argmax


def draw_guesses(
    sampler: SamplerRows, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Draw a token of each row with the row's own noise, and return the probability that the logits give to each, too.

    What needs more than logits, as penalties do, is left out: those rows get the largest logit.
    """
    logits = _as_wide(logits, sampler.vocab_size)
    index = np.array(rows, np.int32)
    hosted = sampler.hosted(index)
    tokens = argmax(logits[:, : sampler.vocab_size])
    free = np.flatnonzero(~hosted)
    if len(free):
        part = logits[torch.from_numpy(free)]
        tokens[free] = sampler.sample(part, index[free], np.array(positions)[free]).tokens
    tokens = np.maximum(tokens, 0)
    chosen = logits.gather(1, torch.from_numpy(tokens)[:, None])[:, 0].float()
    shares = (chosen - torch.logsumexp(logits.float(), -1)).exp()
    return tokens.tolist(), torch.nan_to_num(shares).tolist()


def _as_wide(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return logits for all tokens of the worker's model, whose table may be wider."""
    missing = vocab_size - logits.shape[1]
    return logits if missing <= 0 else torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
