"""What tiny random models that take images have in common: sizes, token ids, inputs for one image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from interfaces import ImageMetadata

IMAGE = 190
BEGIN = 192
END = 193
HIDDEN = 64
TEXT: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
GRID_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": HIDDEN,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "intermediate_size": 48,
}
IDS: dict[str, Any] = {"image_token_id": IMAGE, "image_token_index": IMAGE, "tie_word_embeddings": False}
GRID_IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": 191,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}
PINPOINTS = [[16, 32], [32, 16], [32, 32]]

# Makes the arrays of one image, by the names of the model's arguments. Each call draws other pixels.
Draw = Callable[[], dict[str, Tensor]]


class Tiny(NamedTuple):
    """A model, the arrays of its images, and how many tokens stand for each."""

    model: PreTrainedModel
    draw: Draw
    tokens: int
    # Tokens around those of an image.
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    # The direction in which the images of a prompt lie one after the other.
    axis: int = 0
    # Whether images come first.
    first: bool = False

    def image(self, arrays: dict[str, Tensor], start: int, image_hash: int | None = None) -> ImageMetadata:
        return ImageMetadata(
            start_idx=start,
            end_idx=start + self.tokens,
            pixel_values=arrays["pixel_values"].numpy(),
            extras={name: array.numpy() for name, array in arrays.items() if name != "pixel_values"},
            image_hash=image_hash,
        )

    def prompt(self, texts: list[list[int]]) -> tuple[NDArray[np.int64], list[int]]:
        """Texts with an image between each two, and where the images begin."""
        tokens = list(texts[0])
        starts = []
        for text in texts[1:]:
            tokens += self.begin
            starts.append(len(tokens))
            tokens += [IMAGE] * self.tokens + [*self.end, *text]
        return np.array(tokens), starts

    def inputs(self, tokens: NDArray[np.int64], images: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Arguments of the model's own `generate`."""
        ids = torch.from_numpy(tokens)[None]
        joined = {name: torch.cat([image[name] for image in images], self.axis) for name in images[0]}
        kind = (ids == IMAGE).int()
        if self.first:
            joined["token_type_ids"] = torch.zeros_like(ids)
        elif self.model.config.model_type == "gemma3":
            joined["token_type_ids"] = kind
        elif self.begin:
            joined["mm_token_type_ids"] = kind
        return {"input_ids": ids} | joined


def _filled(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Draw weights that make neighbouring tokens matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = 0.5 if "embed" in name else 0.15
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    model.eval()
    return model


def pixels(*shape: int, **others: list[Any]) -> Draw:
    return lambda: {"pixel_values": torch.randn(*shape)} | {name: torch.tensor(v) for name, v in others.items()}


def grid(draw: Draw, model: PreTrainedModel) -> Tiny:
    return Tiny(model, draw, 6, (BEGIN,), (END,))


def rope(**others: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4} | others}


def made(make: Callable[[], Tiny], seed: int = 1) -> Tiny:
    tiny = make()
    _filled(tiny.model, seed)
    return tiny
