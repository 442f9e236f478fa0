"""The embedded model: a small chat model of our own, so that tokenyard serves something real with no network.

Knows where the shipped weights lie. Does not know how they were made (see `demo_model`) or how they are served;
importing this package loads nothing heavy.
"""

from pathlib import Path

EMBEDDED_MODEL_PATH: Path = Path(__file__).parent / "weights"
# A small pipeline of diffusers, which paints.
EMBEDDED_PAINTER_PATH: Path = Path(__file__).parent / "painter"

__all__ = ["EMBEDDED_MODEL_PATH", "EMBEDDED_PAINTER_PATH"]
