"""Finds the recurrent layers of a loaded model, by running it once on a few tokens with a cache that listens.

A module that asks the cache for a state, or gives it one, is a mixer, whatever its architecture calls it; what it gives
has the shape and the type of its state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from model_worker.model import ModelRefused
from model_worker.recurrent.mixers import RecurrentLayers
from model_worker.recurrent.states import StateKey, StateLayout, StateShape

# Time steps of a Mamba may have any size.
NO_LIMIT: tuple[float, ...] = (0.0, float("inf"))


class _ListeningCache(DynamicCache):
    """transformers' own cache, and which modules left which states in it."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        # The modules that are being computed, innermost last.
        self.computing: list[nn.Module] = []
        self.mixers: dict[nn.Module, None] = {}
        self.states: dict[StateKey, StateShape] = {}

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        key = StateKey("conv", layer_idx, state_idx)
        self._note(key, StateShape((*conv_states.shape[1:-1], size), conv_states.dtype))
        named = {**kwargs, "conv_kernel_size": conv_kernel_size}
        updated: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **named)
        return updated

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        shape = StateShape(tuple(recurrent_states.shape[1:]), recurrent_states.dtype)
        self._note(StateKey("recurrent", layer_idx, state_idx), shape)
        updated: Tensor = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)
        return updated

    def _note(self, key: StateKey, shape: StateShape) -> None:
        self.mixers[self.computing[-1]] = None
        self.states[key] = shape


def probe_recurrent(model: PreTrainedModel, tokens: Tensor) -> RecurrentLayers:
    """Run `tokens` [1, n] through the model. Leaves it with eager attention. ModelRefused if no layer keeps a state."""
    cache = _ListeningCache(model.config.get_text_config(decoder=True))
    model.set_attn_implementation("eager")
    with torch.inference_mode(), _listening(model, cache):
        model(input_ids=tokens, use_cache=True, cache=cache)
    if not cache.mixers:
        raise ModelRefused(type(model).__name__, "its recurrent layers leave no state in transformers' cache")
    return RecurrentLayers(tuple(cache.mixers), StateLayout(cache.states))


def refuse_time_step_limit(model: PreTrainedModel) -> None:
    """Refuse a config that limits time steps of Mambas: transformers limits those of prompts alone, and not those of
    single tokens, so that a text would go on in another way behind each cut of its prompt. ModelRefused."""
    limit = _time_step_limit(model)
    if limit != NO_LIMIT:
        raise ModelRefused(
            type(model).__name__,
            f"config.json has time_step_limit {list(limit)}, which transformers applies to prompts alone; only "
            "[0.0, Infinity] is served",
        )


def follow_time_step_limit(model: PreTrainedModel) -> None:
    """Let the Mambas of a model limit time steps by the config's `time_step_limit`.

    transformers' Nemotron-H takes `time_step_min` for the lower limit, by which its code for training makes the first
    weights. NVIDIA's own code of these checkpoints and vLLM do not.
    """
    limit = _time_step_limit(model)
    for module in model.modules():
        mamba: Any = module
        if hasattr(module, "time_step_limit"):
            mamba.time_step_limit = limit


def _time_step_limit(model: PreTrainedModel) -> tuple[float, ...]:
    limit = getattr(model.config.get_text_config(decoder=True), "time_step_limit", None)
    return NO_LIMIT if limit is None else tuple(limit)


@contextmanager
def _listening(model: nn.Module, cache: _ListeningCache) -> Iterator[None]:
    """Note in `cache` which module is being computed."""

    def enter(module: nn.Module, _: Any) -> None:
        cache.computing.append(module)

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        cache.computing.pop()

    handles = [each.register_forward_pre_hook(enter) for each in model.modules()]
    handles += [each.register_forward_hook(leave) for each in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
