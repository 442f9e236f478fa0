"""`python -m benchmarks.texts`: texts a second of CPU time that an encoder computes, without server and tokenizer.

Times the ways to run the model in turns: fused layers, and transformers' modules over packed texts. CPU time counts, so
that other processes disturb little. Takes about a minute.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import BertConfig, BertModel

from interfaces import PoolingContext, PoolingTask
from model_worker.pooling.backbone import Packed
from model_worker.pooling.fused import Fused
from model_worker.pooling.load import load_pooling
from model_worker.pooling.texts import Texts

VOCABULARY = 30_522


def mini_model(path: Path) -> Path:
    """Write a BERT of MiniLM's shape with random weights."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=12,
        max_position_embeddings=512,
    )
    model: Any = BertModel(config)
    model.save_pretrained(path)
    return path


def best(action: Any, seconds: float) -> float:
    """Return the least CPU time of a call: others only ever add to it."""
    action()
    least = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.process_time()
        action()
        least = min(least, time.process_time() - start)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.texts", description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, help="a Hugging Face directory; without it a BERT of MiniLM's shape is made")
    add("--quantization", default="none", choices=("none", "int8"))
    add("--threads", type=int, default=1)
    add("--tokens", type=int, nargs="+", default=[16, 128, 512])
    add("--batch", type=int, nargs="+", default=[1, 32])
    add("--seconds", type=float, default=2.0, help="for each figure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or mini_model(Path(folder))
        pooler = load_pooling(path, quantization=options.quantization)
    backbone = pooler.backbone
    ways: dict[str, Any] = {backbone.description: backbone}
    if isinstance(backbone, Fused):
        backbone.model.set_attn_implementation("tokenyard_packed")
        modules = Packed(backbone.model, backbone.first_position)
        ways[f"transformers' modules, {modules.description}"] = modules
    out = Table("tokens", "texts at once", *ways)
    rng = np.random.default_rng(0)
    for tokens in options.tokens:
        for batch in options.batch:
            ids = [rng.integers(1000, min(VOCABULARY, pooler.vocab_size), tokens).tolist() for _ in range(batch)]
            context = PoolingContext.of(ids, PoolingTask.EMBED)
            texts = Texts.take(context, np.arange(batch), pooler.device)
            with torch.inference_mode():
                found = [batch / best(lambda: way(texts), options.seconds) for way in ways.values()]  # noqa: B023
            out.add_row(str(tokens), str(batch), *(f"{value:.1f}" for value in found))
    console = Console(width=110)
    console.print(f"texts a CPU-second; {options.threads} threads; load average {os.getloadavg()[0]:.1f}")
    console.print(out)


if __name__ == "__main__":
    main()
