"""What the config.json of a codec of speech tokens says: its kind, its rate and its codebooks.

Knows neither torch nor transformers' models, so that the API server reads the same facts as the worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from shared.pooling_modules import object_of

# Codecs of transformers, and the field of config.json that counts their codebooks; none: they have one.
_CODEBOOKS = {"dac": "n_codebooks", "mimi": "num_quantizers", "xcodec2": "", "neucodec": ""}
# SNAC, whose config.json names no type: it is known by the strides of its codebooks.
SNAC = "snac"
_STRIDES = "vq_strides"
KINDS = (*_CODEBOOKS, SNAC)


@dataclass(frozen=True)
class CodecFiles:
    """The facts of one codec. `source` is its directory or hub name."""

    source: str
    kind: str
    config: Mapping[str, Any]

    @classmethod
    def read(cls, source: str | Path) -> CodecFiles:
        """Read a directory or hub name. ValueError names what is missing or not supported."""
        config = object_of(source, "config.json")
        if not config:
            raise ValueError(f"the codec {source} has no config.json: name a codec's directory or hub name")
        kind = SNAC if _STRIDES in config and "model_type" not in config else str(config.get("model_type"))
        if kind not in KINDS:
            raise ValueError(
                f"the codec {source} has model_type {kind!r}; those that can be used are: {', '.join(KINDS)}"
            )
        return cls(str(source), kind, config)

    @property
    def sample_rate(self) -> int:
        """Samples a second."""
        return int(self.config.get("output_sampling_rate") or self.config.get("sampling_rate") or 24_000)

    @property
    def clip_rate(self) -> int:
        """Samples a second of a clip that is encoded."""
        return int(self.config.get("sampling_rate") or 24_000)

    @property
    def codes_of_frame(self) -> tuple[int, ...]:
        """How many codes of each codebook a frame has."""
        if self.kind == SNAC:
            strides = list(map(int, self.config[_STRIDES]))
            return tuple(max(strides) // stride for stride in strides)
        field = _CODEBOOKS[self.kind]
        return (1,) * (int(self.config.get(field, 1)) if field else 1)

    @property
    def codebook_size(self) -> int:
        """The number of entries of each codebook."""
        levels = self.config.get("quantization_levels")
        if isinstance(levels, list):
            return prod(map(int, levels))
        return int(self.config.get("codebook_size", 1024))
