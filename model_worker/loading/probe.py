"""Finds out how a loaded model uses attention, by running it once on a few tokens.

The probe records each attention layer's shapes and arithmetic, and the meaning of each mask: a mask function of
transformers says for any (query, key) whether the key is visible, so the layer's window can be read from it without
knowing the architecture and without a sequence longer than the window. Attention of any other kind is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from model_worker.kv_cache import AttentionParams, KVLayout, LayerShape
from model_worker.model import AttentionLayers, ModelRefused

PROBE_ATTENTION = "tokenyard_probe"
PROBE_TOKENS = 12
# A window at least this wide is taken for none: no model has one between a million tokens and its whole context.
FAR = 1 << 20
# Keys that a mask is asked about at a time.
_KEYS = 1 << 16

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(eq=False)
class _Recording:
    """The findings of one run of the model so far."""

    masks: list[MaskFunction] = field(default_factory=list)
    windows: dict[int, int | None] = field(default_factory=dict)  # by number of the mask
    modules: list[nn.Module] = field(default_factory=list)
    shapes: list[LayerShape] = field(default_factory=list)
    params: list[AttentionParams] = field(default_factory=list)
    dtype: torch.dtype = torch.float32


_recording: ContextVar[_Recording] = ContextVar("recording")


class _NotPageable(Exception):
    """A layer does something that paged causal attention cannot; the message completes 'cannot be served: '."""


def probe_attention(model: PreTrainedModel, tokens: Tensor) -> AttentionLayers:
    """Run `tokens` [1, n] through the model. Leaves the model with the probe as its attention implementation."""
    architecture = type(model).__name__
    recording = _Recording()
    token = _recording.set(recording)
    try:
        model.set_attn_implementation(PROBE_ATTENTION)
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        # The mask of ones keeps transformers from looking for packed sequences, whose mask depends on the input.
        model(input_ids=tokens, position_ids=positions, attention_mask=torch.ones_like(tokens), use_cache=False)
    except _NotPageable as error:
        raise ModelRefused(architecture, str(error)) from error
    finally:
        _recording.reset(token)
    if not recording.modules:
        raise ModelRefused(architecture, "its attention does not go through transformers' attention registry")
    return AttentionLayers(
        layer_of={module: index for index, module in enumerate(recording.modules)},
        params=tuple(recording.params),
        layout=KVLayout(tuple(recording.shapes), recording.dtype),
    )


def _probe_mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, device: torch.device, **_: Any
) -> Tensor:
    """Return a stand-in for a mask, filled with the number under which its mask function is remembered."""
    masks = _recording.get().masks
    masks.append(mask_function)
    return torch.full((batch_size, 1, q_length, kv_length), len(masks) - 1.0, device=device)


def _probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Note the layer's arguments; answer with its values, which have the right shape."""
    recording = _recording.get()
    layer = f"layer {len(recording.modules)} ({type(module).__name__})"
    if module in recording.modules:
        raise _NotPageable(f"{layer} runs more than once per token, so it would need more than one KV cache")
    if query.shape[:2] != (1, query.shape[1]) or query.shape[2] != key.shape[2] or query.shape[1] % key.shape[1]:
        raise _NotPageable(f"{layer} attends with shapes {list(query.shape)} over {list(key.shape)}")
    recording.modules.append(module)
    recording.shapes.append(LayerShape(key.shape[1], key.shape[3], value.shape[3]))
    recording.dtype = key.dtype
    recording.params.append(
        AttentionParams(
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            sliding_window=_window_behind(attention_mask, recording, layer),
            softcap=softcap,
            sinks=None if s_aux is None else s_aux.detach(),
        )
    )
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None


def _window_behind(mask: Tensor | None, recording: _Recording, layer: str) -> int | None:
    """Find the window of the mask function whose stand-in reached a layer."""
    if mask is None or mask.numel() == 0:
        raise _NotPageable(f"{layer} gets no mask from transformers' mask registry, so its window is unknown")
    number = mask.flatten()[0].item()
    if not (mask == number).all() or number not in range(len(recording.masks)):
        raise _NotPageable(f"{layer} adds something of its own to its mask, such as a position bias (ALiBi)")
    if number not in recording.windows:
        recording.windows[int(number)] = _window(recording.masks[int(number)], mask.device, layer)
    return recording.windows[int(number)]


def _window(visible: MaskFunction, device: torch.device, layer: str) -> int | None:
    """Find the sliding window that a mask function amounts to."""
    zero = torch.zeros((), dtype=torch.long, device=device)

    def sees(query: int, keys: Tensor) -> Tensor:
        return visible(zero, zero, torch.tensor(query, device=device), keys).expand(keys.shape)

    def below(end: int) -> Iterator[Tensor]:
        """All keys below `end`, some at a time: a mask function may make much of each."""
        for first in range(0, end, _KEYS):
            yield torch.arange(first, min(first + _KEYS, end), device=device)

    try:
        window = sum(int(sees(FAR, keys).sum()) for keys in below(FAR + 2))
        # Probes at, around and beyond the window's edge distinguish it from chunks, gaps and bidirectional spans.
        edges = {0, 1, 7, window - 1, window, window + 1, 2 * window + 3, FAR - 1, FAR}
        for query in (edge for edge in edges if 0 <= edge <= FAR):
            alike = (
                torch.equal(sees(query, keys), (keys <= query) & (keys > query - window))
                for keys in below(min(query + 2, FAR + 2))
            )
            if not all(alike):
                raise _NotPageable(f"{layer} attends to more or less than a causal window: its mask has another form")
    except (IndexError, RuntimeError, TypeError) as error:
        raise _NotPageable(f"{layer} has a mask that depends on more than positions ({error})") from error
    return None if window > FAR else window


ALL_ATTENTION_FUNCTIONS.register(PROBE_ATTENTION, _probe_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE_ATTENTION, _probe_mask)
