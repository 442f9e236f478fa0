"""Where peers and standard models are kept between benchmarks: a folder in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.encoder_words import ENCODERS
from benchmarks.standard_encoder import standard_encoder
from benchmarks.standard_model import standard_model


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tokenyard" / "bench"


def standard_model_in(cache: Path, size: str) -> Path:
    """The folder of a standard model. Servers serve it under the folder's name unless they get another."""
    models = cache.absolute() / "models"
    if size in ENCODERS:
        return standard_encoder(models / size, size)
    return standard_model(models / f"llama-{size}", size)
