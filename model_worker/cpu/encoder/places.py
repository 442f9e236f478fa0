"""Tables of what attention makes of the places of tokens, as long as the longest text so far.

Asks the model's own modules for angles and biases. Knows no kernel.
"""

from __future__ import annotations

import numpy as np
import torch

from model_worker.cpu.encoder.pattern import EncoderForm, require
from model_worker.cpu.encoder.work import Places

# Places that the first tables have.
_FIRST_PLACES = 512


class PlaceTables:
    """The tables of a model. `kinds` are the frequencies that its layers have, by name."""

    def __init__(self, form: EncoderForm, head_dim: int) -> None:
        self._form = form
        self._head_dim = head_dim
        found = {layer.rotary for layer in form.layers}
        require(len(found) == 1 or None not in found, "some of its layers turn queries and keys, and others do not")
        self.kinds = sorted(kind for kind in found if kind is not None)
        self._places = self._make(_FIRST_PLACES)
        self._count = _FIRST_PLACES

    def of_length(self, longest: int) -> Places:
        """Return tables that reach as far as a text of this length."""
        if longest > self._count:
            self._count = max(longest, 2 * self._count)
            self._places = self._make(self._count)
        return self._places

    def _make(self, count: int) -> Places:
        cos, sin = self._angles(count)
        return Places(cos, sin, self._biases(count))

    def _angles(self, count: int) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
        half = self._head_dim // 2
        if not self.kinds:
            return [np.zeros((1, 0, 0), np.float32)] * 2
        require(self._head_dim % 2 == 0, "its heads have an odd width")
        places = torch.arange(count)[None]
        like = torch.empty(0)
        turns = [
            self._form.rotary(like, places, kind) if kind else self._form.rotary(like, places) for kind in self.kinds
        ]
        width = {part.shape[-1] for turn in turns for part in turn}
        require(width == {2 * half}, "it turns a part of a head")
        return [np.stack([turn[i][0, :, :half].float().numpy() for turn in turns]) for i in range(2)]

    def _biases(self, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        encoder = self._form.distances
        if encoder is None:
            return np.zeros((0, 0), np.float32)
        distances = torch.arange(1 - count, count)
        found = encoder.relative_attention_bias(encoder.relative_position_bucket(distances)).detach().float()
        # Scores are scaled after the bias is added here, and before it in the model.
        return np.ascontiguousarray((found * self._head_dim**0.5).T.numpy())
