"""What a client wants to see, whatever dialect it speaks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A description, and how to paint it. None leaves a value to the model."""

    prompt: str
    negative_prompt: str | None = None
    count: int = 1
    # "WIDTHxHEIGHT" or "auto"; or the sides by themselves.
    size: str | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    # Of the first image's noise; None for a random one.
    seed: int | None = None
    # Previews of the only image.
    previews: int = 0
    # The file of an image to begin with, and that of its mask.
    picture: bytes | None = None
    mask: bytes | None = None
    # Where the client wrote these two.
    picture_field: str = "image"
    mask_field: str = "mask"
    # The change up to which steps reuse the prediction before; 0: none does.
    step_cache: float = 0.0
    # The name of an adapter, and its strength.
    lora: str | None = None
    lora_scale: float | None = None
    # How far the image may leave the one that it begins with, above 0 and up to 1.
    strength: float | None = None
