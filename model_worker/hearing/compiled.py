"""The layers of a recogniser's encoder in compiled calls: one for each, so that the cores may change between two.

The thread that encodes has threads of its own for them: those of steps do not wait for a layer. Knows how a clip's
states go through the layers; knows no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from model_worker.cpu.encoder.layers import EncoderLayers
from model_worker.cpu.encoder.phases import BLOCK_TOKENS
from model_worker.cpu.threads import pool_beside
from model_worker.vision.encode_queue import NICENESS

# Positions of the self-check beyond those that fill a block for each core: blocks are then of unlike lengths. All 1,500
# would take seconds, and many times that for a large model.
_MORE_PROBED = 33


class CompiledLayer(nn.Module):
    """A layer of an encoder. A clip's layers run in order, and no other clip's between them."""

    def __init__(self, layers: EncoderLayers, number: int) -> None:
        super().__init__()
        self._layers = layers
        self._number = number

    def forward(self, states: Tensor) -> Tensor:
        """Change the states, float32 [positions, hidden], in place. The last layer norms them, too."""
        cores = min(torch.get_num_threads(), self._layers.most_cores)
        self._layers.run_layer(self._number, states, pool_beside(cores, NICENESS))
        return states


def compiled_layers(encoder: Any) -> tuple[CompiledLayer, ...]:
    """Return the layers of an encoder whose linear modules are packed. UnsupportedPattern says why there are none."""
    layers = EncoderLayers(encoder)
    return tuple(CompiledLayer(layers, number) for number in range(len(encoder.layers)))


def probed(encoder: Any, compiled: Sequence[CompiledLayer]) -> tuple[Tensor, Tensor]:
    """Return the states [positions, hidden] of the same random ones: those of compiled layers, and the modules'.

    The positions are so many that the cores take blocks of them, if they do of a whole clip.
    """
    first: Any = encoder.layer_norm.weight
    generator = torch.Generator().manual_seed(0)
    enough = torch.get_num_threads() * BLOCK_TOKENS + _MORE_PROBED
    positions = min(enough, encoder.embed_positions.num_embeddings)
    drawn = torch.randn(1, positions, len(first), generator=generator)
    with torch.inference_mode():
        got = drawn[0].clone()
        for layer in compiled:
            got = layer(got)
        want = drawn.to(first.dtype)
        for module in encoder.layers:
            want = module(want, None)
        return got, encoder.layer_norm(want)[0]
