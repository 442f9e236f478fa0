"""The decoder of SNAC: codebooks at several rates, a stack of convolutions that upsamples, and noise that it scales.

Its noise is a function of the place in the sound, so a window has the noise that the whole sound has there. Knows the
names of SNAC's weights; knows no files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Endings of the names of a weight's length and direction, as torch's two forms of weight normalisation have them.
_LENGTHS = {
    ".parametrizations.weight.original0": ".parametrizations.weight.original1",
    ".weight_g": ".weight_v",
}
# Added to a Snake's rate, so that it may be divided by.
_SMALL = 1e-9


class SnacDecoder(nn.Module):
    """Makes the samples of codes. `config` is SNAC's config.json."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        if config.get("attn_window_size"):
            raise ValueError("a SNAC with attention (attn_window_size) is not supported: use the one of 24 kHz")
        self.strides: list[int] = list(config["vq_strides"])
        latent = int(config.get("latent_dim") or config["encoder_dim"] * 2 ** len(config["encoder_rates"]))
        books = [_Codebook(config["codebook_size"], config["codebook_dim"], latent) for _ in self.strides]
        self.quantizer = nn.ModuleDict({"quantizers": nn.ModuleList(books)})
        self.decoder = nn.ModuleDict({"model": _stack(config, latent)})
        scale = max(self.strides)
        for layer in self.decoder["model"].modules():
            if isinstance(layer, nn.ConvTranspose1d):
                scale *= int(layer.stride[0])
            elif isinstance(layer, _Noise):
                layer.samples_of_frame = scale
        for number, noise in enumerate(self.noises):
            noise.number = number

    @property
    def noises(self) -> list[_Noise]:
        return [layer for layer in self.modules() if isinstance(layer, _Noise)]

    def decode(self, codes: list[Tensor], first_frame: int) -> Tensor:
        """Return the samples [samples] of the codes of each codebook, whose first frame has this place in the sound."""
        for noise in self.noises:
            noise.first_frame = first_frame
        quantized: Any = self.quantizer["quantizers"]
        latents = [
            book(indices).repeat_interleave(stride, dim=-1)
            for book, indices, stride in zip(quantized, codes, self.strides, strict=False)
        ]
        found: Tensor = self.decoder["model"](torch.stack(latents).sum(0))
        return found.reshape(-1)


class _Codebook(nn.Module):
    def __init__(self, size: int, width: int, latent: int) -> None:
        super().__init__()
        self.codebook = nn.Embedding(size, width)
        self.out_proj = nn.Conv1d(width, latent, 1)

    def forward(self, indices: Tensor) -> Tensor:
        """Return the latents [1, latent, codes] of codes."""
        found: Tensor = self.out_proj(self.codebook(indices).T[None])
        return found


class _Snake(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, width, 1))

    def forward(self, states: Tensor) -> Tensor:
        return states + torch.sin(self.alpha * states).square() / (self.alpha + _SMALL)


class _Noise(nn.Module):
    """Adds noise in the strength that the states themselves give."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Conv1d(width, width, 1, bias=False)
        # Set by the decoder: which noise it is, the samples of a frame here, and the place of the first frame.
        self.number = 0
        self.samples_of_frame = 1
        self.first_frame = 0

    def forward(self, states: Tensor) -> Tensor:
        noise = frame_noise(self.number, self.first_frame, states.shape[-1], self.samples_of_frame)
        strength: Tensor = self.linear(states)
        return states + noise.to(states.device) * strength


def frame_noise(number: int, first_frame: int, count: int, samples_of_frame: int) -> Tensor:
    """Return so many samples of one noise, [count]: those of each frame follow from its place alone."""
    frames = []
    for frame in range(first_frame, first_frame + -(-count // samples_of_frame)):
        generator = torch.Generator().manual_seed((frame << 8) + number)
        frames.append(torch.randn(samples_of_frame, generator=generator))
    return torch.cat(frames)[:count]


class _Residual(nn.Module):
    def __init__(self, width: int, dilation: int, groups: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            _Snake(width),
            nn.Conv1d(width, width, 7, dilation=dilation, padding=3 * dilation, groups=groups),
            _Snake(width),
            nn.Conv1d(width, width, 1),
        )

    def forward(self, states: Tensor) -> Tensor:
        changed: Tensor = self.block(states)
        return states + changed


class _Upsampling(nn.Module):
    def __init__(self, width: int, narrower: int, stride: int, has_noise: bool, groups: int) -> None:
        super().__init__()
        padding = math.ceil(stride / 2)
        up = nn.ConvTranspose1d(width, narrower, 2 * stride, stride=stride, padding=padding, output_padding=stride % 2)
        noise = [_Noise(narrower)] if has_noise else []
        residuals = [_Residual(narrower, dilation, groups) for dilation in (1, 3, 9)]
        self.block = nn.Sequential(_Snake(width), up, *noise, *residuals)

    def forward(self, states: Tensor) -> Tensor:
        found: Tensor = self.block(states)
        return found


def _stack(config: Mapping[str, Any], latent: int) -> nn.Sequential:
    width = int(config["decoder_dim"])
    depthwise = bool(config.get("depthwise", True))
    layers: list[nn.Module] = (
        [nn.Conv1d(latent, latent, 7, padding=3, groups=latent), nn.Conv1d(latent, width, 1)]
        if depthwise
        else [nn.Conv1d(latent, width, 7, padding=3)]
    )
    for stride in config["decoder_rates"]:
        narrower = width // 2
        has_noise = bool(config.get("noise", True))
        layers.append(_Upsampling(width, narrower, int(stride), has_noise, narrower if depthwise else 1))
        width = narrower
    return nn.Sequential(*layers, _Snake(width), nn.Conv1d(width, 1, 7, padding=3), nn.Tanh())


def plain_weights(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the decoder's weights: those that are stored as a length and a direction are multiplied out."""
    found: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.startswith("encoder.") or ".in_proj." in name:
            continue
        ending = next((each for each in (*_LENGTHS, *_LENGTHS.values()) if name.endswith(each)), None)
        if ending is None:
            found[name] = tensor.float()
        elif ending in _LENGTHS:
            base = name.removesuffix(ending)
            direction = stored[base + _LENGTHS[ending]].float()
            norm = functional.normalize(direction.flatten(1), dim=1, eps=0.0).view_as(direction)
            found[f"{base}.weight"] = tensor.float() * norm
    return found
