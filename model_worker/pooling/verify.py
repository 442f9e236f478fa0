"""Proves at load that a model gives the same hidden states and values as transformers' own forward pass, text by text.

Three texts of different lengths go through the model one by one, and through the backbone in one pass. A layer that
mixes texts, counts positions in its own way or has a window of another kind gives other states, whatever its
architecture calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from model_worker.loading.verify import TOLERANCE
from model_worker.pooling.backbone import Backbone
from model_worker.pooling.heads import ModelHead
from model_worker.pooling.judge import Judge
from model_worker.pooling.texts import Texts

# Lengths of the texts. The longest exceeds a window, if the model has one of at most LONGEST_WINDOW tokens.
LENGTHS = (3, 11, 24)
LONGEST_WINDOW = 256
# Lengths of the texts whose inputs are smoothed. A word by itself has other large inputs than a sentence.
SMOOTHED_LENGTHS = (*(24 * (1,)), *(12 * (2,)), *(6 * (3,)), 4, 6, 8, 11, 16, 24, 48)
BEYOND_WINDOW = 9
# Error of the hidden states of int8 layers that round activations, too: another form of the model is further off.
COARSE_TOLERANCE = 0.2


def probe_texts(
    config: PreTrainedConfig,
    vocab_size: int,
    max_tokens: int,
    device: torch.device,
    wanted: Sequence[int] = LENGTHS,
) -> Texts:
    """Return texts of ordinary tokens of the `wanted` lengths, the same ones each time."""
    windows = (getattr(config, name, None) for name in ("sliding_window", "local_attention"))
    window = max((window for window in windows if window is not None and window <= LONGEST_WINDOW), default=0)
    lengths = [min(length, max_tokens) for length in wanted]
    lengths[-1] = min(max(lengths[-1], window + BEYOND_WINDOW), max_tokens)
    draws = torch.randint(0, vocab_size, (64 + 2 * sum(lengths),), generator=torch.Generator().manual_seed(0))
    # Padding has an embedding of its own kind, and some models treat it as absent.
    padding = getattr(config, "pad_token_id", None)
    ordinary = draws[draws != (-1 if padding is None else padding)]
    return Texts(ordinary[: sum(lengths)].to(device), tuple(lengths))


def expected_states(model: nn.Module, texts: Texts) -> Tensor:
    """Return the last hidden states [T, width] as transformers computes them, text by text."""
    outputs = [model(input_ids=tokens[None]) for tokens in texts.tokens.split(texts.lengths)]
    return torch.cat([output.last_hidden_state[0] for output in outputs])


def expected_logits(model: nn.Module, texts: Texts) -> list[Tensor]:
    """Return the logits of each text as transformers computes them."""
    return [model(input_ids=tokens[None]).logits[0] for tokens in texts.tokens.split(texts.lengths)]


def states_differ(backbone: Backbone, texts: Texts, expected: Tensor) -> str | None:
    """Explain how the backbone's states differ from `expected`; None if they do not."""
    try:
        error = relative_error(backbone(texts), expected)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error_of_model:
        return (str(error_of_model).strip() or type(error_of_model).__name__).splitlines()[0]
    if error < TOLERANCE[expected.dtype]:
        return None
    return f"its hidden states are others than those of the texts one by one (relative error {error:.2g})"


def coarse_states_differ(backbone: Backbone, texts: Texts, expected: Tensor, judge: Judge) -> str | None:
    """Explain how the states of int8 layers differ from `expected`, those of int8 weights, or what the judge says of
    them; None if they are close."""
    got = backbone(texts)
    error = relative_error(got, expected)
    if not error < COARSE_TOLERANCE:
        return f"its hidden states are others than those of its int8 weights (relative error {error:.2g})"
    reason = judge(backbone(judge.texts))
    return None if reason is None else f"rounding activations {reason}"


def logits_differ(head: ModelHead, states: Tensor, texts: Texts, expected: Sequence[Tensor], last: bool) -> str | None:
    """Explain how the head's logits, for the model's own states of each text, differ from the whole model's.

    With `last` the head reads the last token of a text alone.
    """
    tokens = texts.tokens.split(texts.lengths)
    for got_states, ids, want in zip(states.split(texts.lengths), tokens, expected, strict=True):
        if last:
            got_states, ids = got_states[-1:], ids[-1:]
        got = head.logits(got_states[None], ids[None], torch.ones_like(ids)[None])[0]
        error = relative_error(got.reshape(-1, got.shape[-1]), want.reshape(-1, want.shape[-1]))
        if not error < TOLERANCE[want.dtype]:
            return (
                f"its head gives other logits than the whole model (relative error {error:.2g}), so it reads more than "
                "the last hidden states"
            )
    return None


def framed(texts: Texts, first: list[int], last: list[int]) -> Texts:
    """Return the texts with these tokens around each."""
    around = (torch.tensor(first, dtype=torch.int64), torch.tensor(last, dtype=torch.int64))
    before, after = (tokens.to(texts.device) for tokens in around)
    parts = [torch.cat([before, tokens, after]) for tokens in texts.tokens.split(texts.lengths)]
    return Texts(torch.cat(parts), tuple(len(part) for part in parts))


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return |got - want| / |want| of the worst row in float32, and of the median row in half precision, where rounding
    may send a token to another expert."""
    exact = want.dtype == torch.float32
    got = got.float()
    want = want.float()
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-6)
    return float(errors.max() if exact else errors.median())
