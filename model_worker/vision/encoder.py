"""Encodes images and videos: pixel values in, the vectors that stand for the image's tokens out.

Knows how a composite model of transformers encodes one image or video. Does not know rows, nor when one is encoded.
Those that hear are in hearing/sounds.py.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from interfaces import ImageMetadata
from model_worker.vision.adapters import TowerAdapters
from model_worker.vision.composite import decoder_of, text_modules
from model_worker.vision.family import Family
from model_worker.vision.positions import SECONDS

# [n, (1 + levels) x hidden]: the embedding of each image token, then what the first layers add (DeepStack).
Features = NDArray[np.float32]
# The content of the adapter that changes an image's features, and the hash of the image.
FeatureKey = tuple[str, int]

# Bytes of features that are kept for images that come again.
CPU_CACHE_BYTES = 256 << 20
CUDA_CACHE_BYTES = 1 << 30
# Extras that count for positions only.
_POSITIONAL = (SECONDS,)


class Medium(NamedTuple):
    """How a model encodes a kind of medium."""

    # Its name in errors, with the article.
    name: str
    # The argument that takes `pixel_values`.
    main: str
    # Names of all arguments.
    known: set[str]
    encode: Callable[..., Any]


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

    # Positions of a video's time for each of its seconds; 0: they count its frames.
    tokens_per_second: float = 0.0

    @cached_property
    def _known(self) -> set[str]:
        """Names of the arguments that the composite and its inner model take for an image."""
        return self.parameters("get_image_features")

    @cached_property
    def _known_of_videos(self) -> set[str]:
        """Names of the arguments for a video; empty if the model takes none."""
        return self.parameters("get_video_features")

    def parameters(self, method: str) -> set[str]:
        """Return the names of the arguments of a method of the composite, or of its inner model."""
        takers = [getattr(taker, method, None) for taker in (self.composite, self.composite.model)]
        return {name for taker in takers if taker is not None for name in inspect.signature(taker).parameters}

    @cached_property
    def adapters(self) -> TowerAdapters:
        """What adapters change about the features."""
        return TowerAdapters(self.composite, self._adaptable(), self.device, self.dtype)

    def _adaptable(self) -> dict[str, nn.Module]:
        """Return the modules that adapters may change, by their names in files."""
        text = text_modules(self.composite)
        return {name: module for name, module in self.composite.named_modules() if name and module not in text}

    @property
    def bits_are_fixed(self) -> bool:
        """Whether features have the same bits on a CPU with any number of cores: products of bfloat16 have."""
        return self.dtype == torch.bfloat16

    @property
    def cache_bytes(self) -> int:
        """Bytes of features that are worth keeping on this device."""
        return CUDA_CACHE_BYTES if self.device.type == "cuda" else CPU_CACHE_BYTES

    def layers(self) -> Iterator[nn.Module]:
        """The layers of the tower and of what projects its features."""
        text = set(decoder_of(self.composite).modules())
        for module in self.composite.modules():
            if isinstance(module, nn.ModuleList) and module not in text:
                yield from module

    def medium(self, image: ImageMetadata) -> Medium:
        """Return how the model encodes this kind of medium. ValueError for one that it does not take."""
        if not image.is_video:
            return Medium("an image", "pixel_values", self._known, self.composite.get_image_features)
        if not self._known_of_videos:
            raise ValueError("a video was sent to a model that takes images only")
        return Medium("a video", "pixel_values_videos", self._known_of_videos, self.composite.get_video_features)

    def parts(self, image: ImageMetadata) -> list[ImageMetadata]:
        """Return the parts of a medium that are encoded one after another; their features are put together."""
        return [image]

    def encoded(
        self, image: ImageMetadata, adapter: int, content: str, go_on: Callable[[], bool] = lambda: True
    ) -> Features | None:
        """Return the features of all parts of a medium, as `encode` does; None if `go_on` says no between two."""
        features: list[Features] = []
        for part in self.parts(image):
            if features and not go_on():
                return None
            features.append(self.encode(part, adapter, content))
        return features[0] if len(features) == 1 else np.concatenate(features)

    def encode(self, image: ImageMetadata, adapter: int = 0, content: str = "") -> Features:
        """Return the features of one medium. ValueError says what is wrong with its arrays.

        An `adapter` whose `content` is not empty changes them.
        """
        what, main, known, encode = self.medium(image)
        arrays = {main: self._pixels(image)}
        extras = {name: array for name, array in image.side_arrays.items() if name not in _POSITIONAL}
        arrays |= {name: torch.from_numpy(np.array(array)).to(self.device) for name, array in extras.items()}
        if unknown := sorted(arrays.keys() - known):
            raise ValueError(f"extras of {what} must be arguments of the model's encoder, got {', '.join(unknown)}")
        try:
            with torch.inference_mode(), self.adapters.rows(adapter, content):
                output: Any = encode(**arrays)
                features = self._joined(output)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
            raise ValueError(f"{what} cannot be encoded ({shapes}): {error}") from error
        if not np.isfinite(features).all():
            raise ValueError(f"the features of {what} are not finite numbers")
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
    """Features by the hash of their image and the content of their adapter.

    The least recently used leave when there are more than `most_bytes`.

    A row holds the features that it still needs itself, so what leaves costs an image that comes again, and no row.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[FeatureKey, Features] = OrderedDict()
        self.bytes = 0
        self.hits = 0

    def get(self, key: FeatureKey | None) -> Features | None:
        """The features of an image, if they are here."""
        features = None if key is None else self._kept.get(key)
        if key is not None and features is not None:
            self._kept.move_to_end(key)
            self.hits += 1
        return features

    def put(self, key: FeatureKey | None, features: Features) -> None:
        """Keep an image's features. An image without a hash equals no other, so it is not kept."""
        if key is None or key in self._kept:
            return
        self._kept[key] = features
        self.bytes += features.nbytes
        while self.bytes > self._most_bytes:
            self.bytes -= self._kept.popitem(last=False)[1].nbytes


def make_encoder(
    composite: PreTrainedModel,
    family: Family,
    dtype: torch.dtype,
    device: torch.device,
    kind: type[Encoder] = Encoder,
) -> Encoder:
    """Make the encoder, of a kind, of a composite model whose weights are loaded."""
    config: Any = composite.config
    text = config.get_text_config(decoder=True)
    pad = getattr(text, "pad_token_id", None)
    embedding: Any = composite.get_input_embeddings()
    width = embedding.embedding_dim
    vision = getattr(config, "vision_config", None)
    merge = getattr(vision, "spatial_merge_size", 1) if family.grid_positions else 1
    return kind(
        composite,
        family,
        dtype,
        device,
        hidden_size=int(width),
        pad_token_id=0 if pad is None else int(pad),
        merge_size=int(merge),
        tokens_per_second=float(getattr(vision, "tokens_per_second", None) or 0) if family.grid_positions else 0.0,
    )
