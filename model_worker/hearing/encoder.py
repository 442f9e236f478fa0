"""Encodes clips of speech: a log-mel spectrogram in, the vectors that the decoder attends to out.

Knows the encoder of an encoder-decoder of transformers. Does not know rows, nor when a clip is encoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from interfaces import ImageMetadata
from model_worker.hearing.compiled import CompiledLayer
from model_worker.vision.encoder import Encoder, Features
from model_worker.vision.family import Family
from shared.recogniser_files import SPEECH_TYPES, clip_tokens


@dataclass(frozen=True, eq=False)
class ClipEncoder(Encoder):
    """The encoder of a recogniser. A clip comes as an image: its pixels are log-mel features [bins, frames]."""

    # The encoder's layers in compiled calls; empty where transformers' modules are run.
    compiled: tuple[CompiledLayer, ...] = ()

    def layers(self) -> Iterator[nn.Module]:
        """The layers of the encoder."""
        layers: Any = self.composite.model.encoder.layers
        yield from self.compiled or layers

    @property
    def bits_are_fixed(self) -> bool:
        """Whether a layer's states, and those of the convolutions, have the same bits with one core and with all.

        It is tried, because it depends on who multiplies: packed products of float32 have, and torch's own have not.
        """
        config: Any = self.composite.config
        generator = torch.Generator().manual_seed(0)
        shape = config.num_mel_bins, 2 * config.max_source_positions
        clip = torch.randn(shape, generator=generator).to(self.device, self.dtype)
        first: Any = next(self.layers())
        cores = torch.get_num_threads()
        found = []
        with torch.inference_mode():
            for count in (1, cores):
                torch.set_num_threads(count)
                heard = self._convolved(clip)
                found.append(first(heard.float()) if self.compiled else first(heard[None], None))
        return torch.equal(*found)

    def _adaptable(self) -> dict[str, nn.Module]:
        """No module of the encoder: adapters change the decoder alone."""
        return {}

    def encode(self, image: ImageMetadata, adapter: int = 0, content: str = "") -> Features:
        """Return the vectors [clip_tokens, hidden], of which those behind the encoder's positions are zeros."""
        config: Any = self.composite.config
        features = self._pixels(image)
        wanted = (config.num_mel_bins, 2 * config.max_source_positions)
        if tuple(features.shape) != wanted:
            raise ValueError(f"a clip must have features of the shape {list(wanted)}, got {list(features.shape)}")
        with torch.inference_mode():
            states = self._states(features).float().cpu().numpy()
        if not np.isfinite(states).all():
            raise ValueError("the states of a clip are not finite numbers")
        return np.pad(states, ((0, clip_tokens(len(states)) - len(states)), (0, 0)))

    def _states(self, features: Tensor) -> Tensor:
        """Return the last hidden states [positions, hidden] of features [bins, frames]."""
        encoder: Any = self.composite.model.encoder
        if not self.compiled:
            output = encoder(features.unsqueeze(0))
            found: Tensor = output.last_hidden_state[0]
            return found
        states: Tensor = (self._convolved(features) + encoder.embed_positions.weight).float()
        for layer in self.compiled:
            states = layer(states)
        return states

    def _convolved(self, features: Tensor) -> Tensor:
        """Return what the convolutions make of features [bins, frames]: [positions, hidden]."""
        encoder: Any = self.composite.model.encoder
        heard = features.unsqueeze(0)
        for convolution in (encoder.conv1, encoder.conv2):
            heard = functional.gelu(convolution(heard))
        found: Tensor = heard[0].T.contiguous()
        return found


def hears(config: PreTrainedConfig) -> bool:
    """Whether it is the config of a recogniser."""
    return config.model_type in SPEECH_TYPES and bool(config.is_encoder_decoder)


def clip_encoder(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> ClipEncoder:
    """Make the encoder of a recogniser whose weights are loaded."""
    config: Any = model.config
    return ClipEncoder(
        model, Family(), dtype, device, hidden_size=int(config.d_model), pad_token_id=int(config.pad_token_id or 0)
    )
