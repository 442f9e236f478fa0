"""The order of speech tokens: what a row may have next follows from the number of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from interfaces import ProcessorInputs, SamplingParams, TextContext
from model_worker.speech.token_order import TokenOrder

# Two codes of a frame, of four values each; the speech ends with token 1.
ORDER = TokenOrder({"zeros": [6, 2], "codes": 4, "ends": [1, 99]})


def allowed(tokens: Sequence[int]) -> list[int]:
    """The tokens that may follow these, in a vocabulary of twelve."""
    context = TextContext.from_prompt(np.array([0], np.int32), SamplingParams())
    for token in tokens:
        context.update(token)
    logits = torch.arange(12, dtype=torch.float32)
    ORDER(ProcessorInputs(logits=logits[None], context=context))
    kept = torch.isfinite(logits).nonzero().flatten()
    assert torch.equal(logits[kept], kept.float())
    return [int(token) for token in kept]


def test_codes_take_turns_and_the_end_stands_between_frames() -> None:
    assert allowed([]) == [6, 7, 8, 9]
    assert allowed([7]) == [2, 3, 4, 5]
    assert allowed([7, 2]) == [1, 6, 7, 8, 9]
    assert allowed([7, 2, 9]) == [2, 3, 4, 5]
