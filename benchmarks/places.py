"""Where peers and standard models are kept between benchmarks: a folder in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.encoder_words import ENCODERS
from benchmarks.standard_encoder import standard_encoder
from benchmarks.standard_model import standard_model
from benchmarks.standard_work import GGUF

# Names the file of the work Q1 to Q512, such as a model's Q4_K_M.
GGUF_FILE = "TOKENYARD_BENCH_GGUF"


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tokenyard" / "bench"


def standard_model_in(cache: Path, size: str) -> Path:
    """Return the folder of a standard model, or the GGUF file. Servers serve it under its name unless they get another.

    Raises ValueError where there is no such file.
    """
    if size == GGUF:
        named = os.environ.get(GGUF_FILE, "")
        if not named.endswith(".gguf") or not Path(named).is_file():
            raise ValueError(f"{GGUF_FILE} must name the GGUF file that is served, and is {named!r}")
        return Path(named).absolute()
    models = cache.absolute() / "models"
    if size in ENCODERS:
        return standard_encoder(models / size, size)
    return standard_model(models / f"llama-{size}", size)
