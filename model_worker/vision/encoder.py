"""Encodes images: pixel values in, the vectors that stand for the image's tokens out.

Knows how a composite model of transformers encodes one image. Does not know rows, nor when an image is encoded.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from interfaces import ImageMetadata
from model_worker.vision.family import Family

# [n, (1 + levels) x hidden]: the embedding of each image token, then what the first layers add (DeepStack).
Features = NDArray[np.float32]

# Bytes of features that are kept for images that come again.
CPU_CACHE_BYTES = 256 << 20
CUDA_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, eq=False)
class Encoder:
    """The vision tower and the projector of `composite`, which encode one image at a time."""

    composite: Any
    family: Family
    dtype: torch.dtype
    device: torch.device
    # Width of a token's embedding.
    hidden_size: int
    # Stands for image tokens in what the decoder embeds: their own ids may lie outside of its vocabulary.
    pad_token_id: int
    # Patches of the encoder on each side of a token; 1 where positions do not count the grid.
    merge_size: int = 1

    @cached_property
    def _known(self) -> set[str]:
        """Names of the arguments that the composite and its inner model take for an image."""
        takers = (self.composite, self.composite.model)
        return {name for taker in takers for name in inspect.signature(taker.get_image_features).parameters}

    @property
    def cache_bytes(self) -> int:
        """Bytes of features that are worth keeping on this device."""
        return CUDA_CACHE_BYTES if self.device.type == "cuda" else CPU_CACHE_BYTES

    def encode(self, image: ImageMetadata) -> Features:
        """Return the features of one image. ValueError says what is wrong with its arrays."""
        arrays = {"pixel_values": self._pixels(image)}
        arrays |= {name: torch.from_numpy(np.array(array)).to(self.device) for name, array in image.side_arrays.items()}
        if unknown := sorted(arrays.keys() - self._known):
            raise ValueError(f"extras of an image must be arguments of the model's encoder, got {', '.join(unknown)}")
        try:
            with torch.inference_mode():
                output: Any = self.composite.get_image_features(**arrays)
                features = self._joined(output)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
            raise ValueError(f"an image cannot be encoded ({shapes}): {error}") from error
        if not np.isfinite(features).all():
            raise ValueError("the features of an image are not finite numbers")
        return features

    def _pixels(self, image: ImageMetadata) -> Tensor:
        pixels = image.pixels
        if pixels.dtype == np.uint16:
            bits = torch.from_numpy(pixels.view(np.int16).copy())
            return bits.view(torch.bfloat16).to(self.device, self.dtype)
        return torch.from_numpy(np.array(pixels)).to(self.device, self.dtype)

    def _joined(self, output: Any) -> Features:
        parts = [_flat(getattr(output, "pooler_output", output), self.hidden_size)]
        parts += [_flat(level, self.hidden_size) for level in getattr(output, "deepstack_features", None) or ()]
        return torch.cat(parts, dim=1).float().cpu().numpy()


def _flat(features: Tensor | list[Tensor] | tuple[Tensor, ...], width: int) -> Tensor:
    """Join the features of an image's tiles to one matrix."""
    if isinstance(features, Tensor):
        return features.reshape(-1, width)
    return torch.cat([part.reshape(-1, width) for part in features])


class EncoderCache:
    """Features by the hash of their image. The least recently used leave when there are more than `most_bytes`.

    A row holds the features that it still needs itself, so what leaves costs an image that comes again, and no row.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[int, Features] = OrderedDict()
        self.bytes = 0
        self.hits = 0

    def get(self, image_hash: int | None) -> Features | None:
        """The features of an image, if they are here."""
        features = None if image_hash is None else self._kept.get(image_hash)
        if image_hash is not None and features is not None:
            self._kept.move_to_end(image_hash)
            self.hits += 1
        return features

    def put(self, image_hash: int | None, features: Features) -> None:
        """Keep an image's features. An image without a hash equals no other, so it is not kept."""
        if image_hash is None or image_hash in self._kept:
            return
        self._kept[image_hash] = features
        self.bytes += features.nbytes
        while self.bytes > self._most_bytes:
            self.bytes -= self._kept.popitem(last=False)[1].nbytes


def make_encoder(composite: PreTrainedModel, family: Family, dtype: torch.dtype, device: torch.device) -> Encoder:
    """Make the encoder of a composite model whose weights are loaded."""
    config: Any = composite.config
    text = config.get_text_config(decoder=True)
    pad = getattr(text, "pad_token_id", None)
    embedding: Any = composite.get_input_embeddings()
    width = embedding.weight.shape[-1]
    vision = getattr(config, "vision_config", None)
    merge = getattr(vision, "spatial_merge_size", 1) if family.grid_positions else 1
    return Encoder(composite, family, dtype, device, int(width), 0 if pad is None else int(pad), int(merge))
