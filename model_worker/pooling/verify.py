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
from model_worker.pooling.texts import Texts

# Lengths of the texts. The longest exceeds a window, if the model has one of at most LONGEST_WINDOW tokens.
LENGTHS = (3, 11, 24)
LONGEST_WINDOW = 256
BEYOND_WINDOW = 9
# Cosine between a vector of the quantized model and of the model as it was.
LEAST_COSINE = 0.999


def probe_texts(config: PreTrainedConfig, vocab_size: int, max_tokens: int, device: torch.device) -> Texts:
    """Return texts of ordinary tokens, the same ones each time."""
    windows = (getattr(config, name, None) for name in ("sliding_window", "local_attention"))
    window = max((window for window in windows if window is not None and window <= LONGEST_WINDOW), default=0)
    lengths = [min(length, max_tokens) for length in LENGTHS]
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


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return |got - want| / |want| of the worst row in float32, and of the median row in half precision, where rounding
    may send a token to another expert."""
    exact = want.dtype == torch.float32
    got = got.float()
    want = want.float()
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-6)
    return float(errors.max() if exact else errors.median())


def least_cosine(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Return the smallest cosine between the mean states of each text."""
    pairs = zip(got, want, strict=True)
    cosines = [torch.cosine_similarity(a.float().mean(0), b.float().mean(0), dim=0) for a, b in pairs]
    return float(torch.stack(cosines).min())
