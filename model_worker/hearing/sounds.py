"""Encodes the sounds of a conversation: log-mel windows in, the vectors that stand for the sound's tokens out.

Knows the encoders of models that hear, as transformers has them. Does not know rows, nor when a sound is encoded.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_bidirectional_mask

from interfaces import ImageMetadata
from model_worker.vision.encoder import Encoder, Medium

# The method of a composite that encodes a sound. Qwen2-Audio has none.
_METHOD = "get_audio_features"


class SoundEncoder(Encoder):
    """The encoder of a model that hears. A sound comes as an image: its pixels are windows [n, bins, frames]."""

    @cached_property
    def _heard(self) -> Medium:
        if hasattr(self.composite, _METHOD):
            return Medium("a sound", "input_features", self.parameters(_METHOD), getattr(self.composite, _METHOD))
        known = {"input_features", "feature_attention_mask"}
        return Medium("a sound", "input_features", known, self._of_masked_windows)

    def parts(self, image: ImageMetadata) -> list[ImageMetadata]:
        """Return the windows of a sound, which no encoder mixes: all at once would take as much memory as all need."""
        windows = image.pixels
        extras = image.side_arrays
        if windows.ndim != 3 or len(windows) < 2 or any(len(array) != len(windows) for array in extras.values()):
            return [image]
        return [
            replace(
                image,
                pixel_values=windows[i : i + 1],
                extras={name: array[i : i + 1] for name, array in extras.items()},
            )
            for i in range(len(windows))
        ]

    def medium(self, image: ImageMetadata) -> Medium:
        """Return how the model encodes a sound. ValueError for a video."""
        if image.is_video:
            raise ValueError("a video was sent to a model that takes sounds only")
        return self._heard

    def _of_masked_windows(self, input_features: Tensor, feature_attention_mask: Tensor) -> Tensor:
        """Encode windows of which a mask [n, frames] says what is sound, as Qwen2-Audio's forward pass does."""
        model: Any = self.composite.model
        tower = model.audio_tower
        positions, tokens = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
        count = (input_features.shape[-1] - 2) // 2 + 1
        seen = _first(positions, count).long()
        mask = create_bidirectional_mask(
            config=tower.config, inputs_embeds=input_features.new_zeros(*seen.shape, 1), attention_mask=seen
        )
        vectors: Tensor = model.multi_modal_projector(tower(input_features, attention_mask=mask).last_hidden_state)
        return vectors[_first(tokens, vectors.shape[1])]


def _first(lengths: Tensor, count: int) -> Tensor:
    """Return which of `count` places are among the first of each length, bool[n, count]."""
    return torch.arange(count, device=lengths.device)[None] < lengths[:, None]
