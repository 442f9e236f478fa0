"""Other servers to measure beside ours: each installed into a folder of its own, at a pinned version.

`python -m benchmarks.peers --help` lists, installs and starts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.peers.infinity import Infinity
from benchmarks.peers.llamacpp import LlamaCpp, LlamaCppInt8
from benchmarks.peers.max import Max
from benchmarks.peers.openvino import OpenVino
from benchmarks.peers.peer import Peer
from benchmarks.peers.transformers import TransformersServe
from benchmarks.peers.vllm import Vllm

KINDS: tuple[type[Peer], ...] = (OpenVino, Vllm, LlamaCpp, LlamaCppInt8, Max, TransformersServe, Infinity)


def known_peers(cache: Path) -> Mapping[str, Peer]:
    return {kind.name: kind(cache) for kind in KINDS}
