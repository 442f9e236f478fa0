"""The memory of a VAE: images with many pixels are encoded and decoded in tiles that overlap.

What a VAE keeps at once grows with the pixels that it sees at once, so a bound of those bounds its memory. Knows the
VAEs of diffusers; knows no requests.
"""

from __future__ import annotations

from typing import Any

# Side of a tile, in pixels. Images with more pixels than a tile are cut.
TILE_SIDE = 1024
# Part of a tile's side that its neighbour sees, too: there the two are blended.
_OVERLAP = 0.25


def tiled(vae: Any, height: int, width: int) -> Any:
    """Return the VAE, which from now on cuts what has more pixels than a tile, if an image of this size has them."""
    vae.use_tiling = height * width > TILE_SIDE**2
    if not vae.use_tiling:
        return vae
    if hasattr(vae, "tile_overlap_factor"):
        vae.tile_overlap_factor = _OVERLAP
        vae.tile_sample_min_size = TILE_SIDE
        vae.tile_latent_min_size = TILE_SIDE >> (len(vae.config.block_out_channels) - 1)
    else:
        stride = int(TILE_SIDE * (1 - _OVERLAP))
        vae.enable_tiling(TILE_SIDE, TILE_SIDE, stride, stride)
    return vae
