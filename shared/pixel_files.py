"""What the JSON files of a diffusers pipeline say: its family, and the sizes and steps of its images.

Reads model_index.json, scheduler_config.json, the config.json of the denoiser and of the VAE, and
generation_config.json. Knows neither torch nor diffusers, so that the API server reads the same facts as the worker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared.pooling_modules import file_of, object_of

# The file that makes a folder a pipeline of diffusers.
INDEX = "model_index.json"
# The file in which a checkpoint may name the steps and the guidance that suit it.
_DEFAULTS = "generation_config.json"
# Pixels of an image, and of a side.
MOST_PIXELS = 2048 * 2048
MOST_SIDE = 4096
# Denoising steps of an image, and guidance.
MOST_STEPS = 200
MOST_GUIDANCE = 50
# Tokens that CLIP reads of a description, with its first and its last.
_CLIP_TOKENS = 77
# Patches of a side that a patched denoiser knows places for, where its config names no number.
_PATCHES_OF_A_SIDE = 96
# Both sides of an image of a UNet are multiples of this, whatever the VAE's scale is.
_UNET_MULTIPLE = 8
_TOKENIZER = "tokenizer"
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "vocab.json", "merges.txt", "special_tokens_map.json")


@dataclass(frozen=True)
class PixelFamily:
    """The facts of pipelines of one class. `denoiser` is the folder of the model that takes the steps.

    `default_sample` is the side of its latents where its config names none. `steps` and `guidance` are diffusers'
    defaults. `patched`: sizes have to be multiples of its patches of latents; `packed`: of two latents. `tokens` are
    those that a description may have; `long_tokens` where the encoder `long_encoder` reads it. `contrasts`: it takes a
    negative prompt. `original` says what an image from the client is: what an image begins with, a reference that the
    model looks at, or nothing that it takes. `strength` is diffusers' default for an image that begins with another
    one, and `mask_strength` where a part of that one stays.
    """

    denoiser: str
    default_sample: int
    steps: int
    guidance: float
    patched: bool = False
    packed: bool = False
    contrasts: bool = True
    tokens: int = _CLIP_TOKENS
    long_encoder: str = ""
    long_tokens: int = _CLIP_TOKENS
    original: Literal["begins", "refers", "none"] = "begins"
    strength: float = 0.6
    mask_strength: float = 0.6


# Families by the class in model_index.json.
FAMILIES: Mapping[str, PixelFamily] = {
    "StableDiffusionPipeline": PixelFamily("unet", 64, 50, 7.5, strength=0.8, mask_strength=1.0),
    "StableDiffusionXLPipeline": PixelFamily("unet", 128, 50, 5.0, strength=0.3, mask_strength=0.9999),
    "StableDiffusion3Pipeline": PixelFamily(
        "transformer", 128, 28, 7.0, patched=True, long_encoder="text_encoder_3", long_tokens=256
    ),
    "FluxPipeline": PixelFamily(
        "transformer", 128, 28, 3.5, packed=True, contrasts=False, long_encoder="text_encoder_2", long_tokens=512
    ),
    "FluxKontextPipeline": PixelFamily(
        "transformer",
        128,
        28,
        3.5,
        packed=True,
        contrasts=False,
        long_encoder="text_encoder_2",
        long_tokens=512,
        original="refers",
    ),
    # Of 512 tokens that these two read, some are those of a chat template.
    "ZImagePipeline": PixelFamily("transformer", 128, 50, 5.0, packed=True, tokens=496),
    "QwenImagePipeline": PixelFamily("transformer", 128, 50, 4.0, packed=True, tokens=496),
    "PixArtAlphaPipeline": PixelFamily("transformer", 128, 20, 4.5, packed=True, tokens=120, original="none"),
    "PixArtSigmaPipeline": PixelFamily("transformer", 128, 20, 4.5, packed=True, tokens=300, original="none"),
    "SanaPipeline": PixelFamily("transformer", 32, 20, 4.5, tokens=300, original="none"),
}
# Fields of the VAE's config with an entry for each time that its encoder halves the sides, and one more.
_BLOCKS = ("block_out_channels", "encoder_block_out_channels")
# Such a field of Qwen-Image's VAE, without one more.
_HALVINGS = "temperal_downsample"


@dataclass(frozen=True)
class PixelFiles:
    """The facts of one pipeline."""

    source: str
    kind: str
    family: PixelFamily
    index: Mapping[str, Any]
    denoiser: Mapping[str, Any]
    vae: Mapping[str, Any]
    schedule: Mapping[str, Any]
    # Of generation_config.json.
    defaults: Mapping[str, Any]

    @classmethod
    def read(cls, source: str | Path) -> PixelFiles:
        """Read a directory or hub name. ValueError names what is missing, broken, or not supported."""
        index = object_of(source, INDEX)
        if not index:
            raise ValueError(f"task 'paint': {source} has no {INDEX}, so it is no pipeline of diffusers")
        kind = str(index.get("_class_name", ""))
        family = FAMILIES.get(kind)
        if family is None:
            raise ValueError(
                f"task 'paint': {INDEX} of {source} has _class_name {kind!r}; the classes that paint here are: "
                f"{', '.join(FAMILIES)}"
            )
        denoiser = _config(source, family.denoiser)
        schedule = object_of(source, "scheduler/scheduler_config.json")
        vae = _config(source, "vae")
        return cls(str(source), kind, family, index, denoiser, vae, schedule, _defaults(source))

    @property
    def scale(self) -> int:
        """Pixels of a side for one of its latents."""
        blocks = next((self.vae[name] for name in _BLOCKS if self.vae.get(name)), None)
        return 1 << (len(self.vae[_HALVINGS]) if blocks is None else len(blocks) - 1)

    @property
    def multiple(self) -> int:
        """The number that both sides of an image have to be multiples of, as diffusers checks it."""
        if self.family.packed:
            return self.scale * 2
        if self.family.patched:
            return self.scale * int(self.denoiser.get("patch_size", 2))
        return max(_UNET_MULTIPLE, self.scale)

    @property
    def longest_side(self) -> int:
        """The longest side of an image: a denoiser that learnt a place for each patch knows no more of them."""
        if not self.family.patched:
            return MOST_SIDE
        patches = int(self.denoiser.get("pos_embed_max_size") or _PATCHES_OF_A_SIDE)
        return min(MOST_SIDE, patches * self.multiple)

    @property
    def default_size(self) -> tuple[int, int]:
        """Height and width of an image where a request names none."""
        sample = self.denoiser.get("sample_size") or self.family.default_sample
        height, width = sample if isinstance(sample, list) else (sample, sample)
        return int(height) * self.scale, int(width) * self.scale

    @property
    def most_steps(self) -> int:
        """Denoising steps that an image can have: a distilled pipeline has no more than its teacher's schedule."""
        most = self.schedule.get("original_inference_steps") or self.schedule.get("num_train_timesteps") or MOST_STEPS
        return min(MOST_STEPS, int(most))

    @property
    def default_steps(self) -> int:
        """Denoising steps where a request names none: what the checkpoint says, or diffusers' default."""
        return min(int(self.defaults.get("num_inference_steps", self.family.steps)), self.most_steps)

    @property
    def default_guidance(self) -> float:
        """Guidance where a request names none: what the checkpoint says, or diffusers' default."""
        return float(self.defaults.get("guidance_scale", self.family.guidance))

    @property
    def longest_prompt(self) -> int:
        """Tokens of the first tokenizer that a description may have."""
        named = self.index.get(self.family.long_encoder, [None])
        has_long = isinstance(named, list) and named[0] is not None
        return self.family.long_tokens if has_long else self.family.tokens

    def size_like(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width for an image like one of these, with no more pixels than the default size."""
        factor = min(1.0, math.sqrt(math.prod(self.default_size) / (height * width)))
        return self.nearest_size(round(height * factor), round(width * factor))

    def nearest_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width nearest to these that an image can have."""
        most = self.longest_side // self.multiple
        sides = [min(most, max(1, round(side / self.multiple))) for side in (height, width)]
        while sides[0] * sides[1] * self.multiple**2 > MOST_PIXELS:
            factor = math.sqrt(MOST_PIXELS / (sides[0] * sides[1] * self.multiple**2))
            smaller = [max(1, int(side * factor)) for side in sides]
            sides = smaller if smaller != sides else [max(1, side - 1) for side in sides]
        return sides[0] * self.multiple, sides[1] * self.multiple


def is_pipeline(source: str | Path) -> bool:
    """Whether a directory or hub name is a pipeline of diffusers."""
    return bool(object_of(source, INDEX).get("_class_name"))


def tokenizer_folder(source: str | Path) -> str:
    """Return the folder of the pipeline's first tokenizer. Its files are fetched first from the hub if need be."""
    found = [file_of(source, f"{_TOKENIZER}/{name}") for name in _TOKENIZER_FILES]
    return next((str(path.parent) for path in found if path is not None), str(source))


def _defaults(source: str | Path) -> dict[str, Any]:
    found = object_of(source, _DEFAULTS)
    for name, least, most in (("num_inference_steps", 1, MOST_STEPS), ("guidance_scale", 0, MOST_GUIDANCE)):
        value = found.get(name, least)
        kinds = int if name == "num_inference_steps" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            raise ValueError(
                f"{name} in {_DEFAULTS} of {source} must be a number from {least} to {most}, got {value!r}"
            )
    return found


def _config(source: str | Path, folder: str) -> dict[str, Any]:
    found = object_of(source, f"{folder}/config.json")
    if not found:
        raise ValueError(f"{folder}/config.json of {source} is missing: copy or download all folders of the pipeline")
    if folder == "vae" and not any(found.get(name) for name in (*_BLOCKS, _HALVINGS)):
        raise ValueError(f"vae/config.json of {source} has no block_out_channels: its class is not supported")
    return found
