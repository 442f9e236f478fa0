"""The families of pipelines that are served."""

from __future__ import annotations

from model_worker.pixels.family import Family
from model_worker.pixels.flows import Flux, FluxKontext, StableDiffusion3
from model_worker.pixels.pixart import PixArt, Sana
from model_worker.pixels.qwen_image import QwenImage
from model_worker.pixels.unets import StableDiffusion, StableDiffusionXL
from model_worker.pixels.z_image import ZImage

# The classes of pipelines, by their name in model_index.json.
FAMILIES: dict[str, type[Family]] = {
    "StableDiffusionPipeline": StableDiffusion,
    "StableDiffusionXLPipeline": StableDiffusionXL,
    "StableDiffusion3Pipeline": StableDiffusion3,
    "FluxPipeline": Flux,
    "FluxKontextPipeline": FluxKontext,
    "ZImagePipeline": ZImage,
    "QwenImagePipeline": QwenImage,
    "PixArtAlphaPipeline": PixArt,
    "PixArtSigmaPipeline": PixArt,
    "SanaPipeline": Sana,
}
