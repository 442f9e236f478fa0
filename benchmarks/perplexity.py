"""`python -m benchmarks.perplexity`: what weights, K and V of fewer bits change in a model, on exchanges.

Draws held-out exchanges of every skill of the embedded model, lets the worker's own forward pass predict the model's
turns, with the weights as they are, with int8 ones, and with K and V in 8 bits, and prints perplexity, the share of
tokens that greedy decoding would hit, how far the distributions are from those of the first row, and what weights and K
and V take. Less than a minute for the embedded model. `--exact` begins with the weights in float32: what a quantised
file means.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy

from demo_model.corpus import shown
from demo_model.evaluate import SEED, SKILLS, held_out
from demo_model.exchange import Exchange
from deploy.embedded_model import EMBEDDED_MODEL_PATH
from model_worker.batch import ForwardBatch
from model_worker.kv_cache import CODE_DTYPES
from model_worker.loading.load import load_model
from model_worker.runner import ModelRunner
from shared.tokenizer_files import load_tokenizer

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Document:
    """`answered` are the positions of tokens that the model should have said."""

    ids: NDArray[np.int64]
    answered: NDArray[np.int64]


# Most logits of the first row that are kept for the others to be compared with: 256 MB.
MOST_KEPT = 1 << 26


class Variant(NamedTuple):
    """A way to load the model."""

    name: str
    dtype: str
    quantization: str = "none"
    kv_dtype: str = "auto"


@dataclass
class Score:
    """What a variant predicts, and its divergence from the first one's distributions."""

    tokens: int = 0
    loss: float = 0.0
    hits: int = 0
    divergence: float = 0.0
    compared: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / self.tokens)

    @property
    def hit_share(self) -> float:
        return self.hits / self.tokens

    @property
    def mean_divergence(self) -> float:
        return self.divergence / max(1, self.compared)


def documents(tokenizer: Any, prompts: int) -> Iterator[Document]:
    """Held-out exchanges, so many of each skill as far as there are."""
    for draw, thinking in SKILLS.values():
        for exchange in held_out(draw, prompts, random.Random(SEED)):
            yield _document(tokenizer, exchange, thinking)


def _document(tokenizer: Any, exchange: Exchange, thinking: bool) -> Document:
    system = [{"role": "system", "content": exchange.system}] if exchange.system else []
    options = {"tools": list(exchange.tools) or None, "enable_thinking": thinking, "tokenize": False}
    asked, said = (
        tokenizer.apply_chat_template(
            [*system, *shown(messages, thinking)], add_generation_prompt=not answered, **options
        )
        for messages, answered in ((exchange.prompt, False), (exchange.messages, True))
    )
    encoded = tokenizer(said, return_offsets_mapping=True)
    starts = np.array([start for start, _ in encoded["offset_mapping"]])
    return Document(np.array(encoded["input_ids"], np.int64), np.flatnonzero(starts >= len(asked)))


def score(
    runner: ModelRunner, texts: Iterable[Document], kept: list[Tensor] | None = None, is_first: bool = True
) -> Score:
    """Score each document alone, in one pass. The first variant fills `kept` with logits; others are compared."""
    result = Score()
    kept = [] if kept is None else kept
    for number, text in enumerate(texts):
        length = np.array([len(text.ids)])
        table = np.arange(-(-len(text.ids) // BLOCK_SIZE), dtype=np.int32)[None]
        batch = ForwardBatch.build(text.ids, length, length, table, BLOCK_SIZE, text.answered - 1)
        logits = runner.backend.logits(batch)
        wanted = torch.from_numpy(text.ids[text.answered])
        result.tokens += len(wanted)
        result.loss += float(cross_entropy(logits.double(), wanted, reduction="sum"))
        result.hits += int((logits.argmax(-1) == wanted).sum())
        if is_first and sum(part.numel() for part in kept) + logits.numel() <= MOST_KEPT and number == len(kept):
            kept.append(logits.float().clone())
        elif number < len(kept):
            own, first = logits.double().log_softmax(-1), kept[number].double().log_softmax(-1)
            result.divergence += float((first.exp() * (first - own)).sum())
            result.compared += len(wanted)
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.perplexity", description=__doc__)
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL_PATH, help="a folder, or a GGUF file")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=100, help="held-out exchanges per skill")
    parser.add_argument("--exact", action="store_true", help="compare with the weights in float32")
    parser.add_argument("--only", default="", help="rows to show, with commas: stored, int8, kv int8, kv fp8")
    options = parser.parse_args(arguments)
    texts = list(documents(load_tokenizer(str(options.model)), options.prompts))
    num_blocks = max(-(-len(text.ids) // BLOCK_SIZE) for text in texts)
    variants = [
        Variant("stored", options.dtype),
        Variant("int8", options.dtype, "int8"),
        *(Variant(f"kv {kind}", options.dtype, kv_dtype=kind) for kind in CODE_DTYPES),
    ]
    wanted = options.only.split(",") if options.only else [variant.name for variant in variants]
    if unknown := set(wanted) - {variant.name for variant in variants}:
        parser.error(f"--only has {', '.join(sorted(unknown))}; rows are {', '.join(v.name for v in variants)}")
    variants = [variant for variant in variants if variant.name in wanted]
    if options.exact:
        variants.insert(0, Variant("exact", "float32"))
    out = Table("row", "perplexity", "greedy hits", "KL", "weights", "K, V of a token", "tokens")
    kept: list[Tensor] = []
    for number, variant in enumerate(variants):
        loaded = load_model(
            options.model,
            variant.dtype,
            "cpu",
            lambda *_: None,
            quantization=variant.quantization,
            kv_dtype=variant.kv_dtype,
        )
        result = score(ModelRunner(loaded, num_blocks, BLOCK_SIZE), texts, kept, number == 0)
        divergence = f"{result.mean_divergence:.5f}" if number else ""
        out.add_row(
            str(loaded.dtype).removeprefix("torch.") if variant.name == "stored" else variant.name,
            f"{result.perplexity:.4f}",
            f"{result.hit_share:.2%}",
            divergence,
            f"{loaded.parameter_bytes / 1e6:.2f} MB",
            f"{loaded.attention.layout.bytes_per_token} B",
            str(result.tokens),
        )
        del loaded
    Console().print(out)


if __name__ == "__main__":
    main()
