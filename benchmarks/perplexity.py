"""`python -m benchmarks.perplexity`: what int8 weights change in the embedded model, on exchanges it never saw.

Draws held-out exchanges of every skill, lets the worker's own forward pass predict the model's turns, once with the
weights as they are and once with int8 ones, and prints perplexity, the share of tokens that greedy decoding would hit,
and what the weights take. Takes less than a minute.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from demo_model.corpus import shown
from demo_model.evaluate import SEED, SKILLS, held_out
from demo_model.exchange import Exchange
from deploy.embedded_model import EMBEDDED_MODEL_PATH
from model_worker.batch import ForwardBatch
from model_worker.loading.checkpoint import QUANTIZATIONS
from model_worker.loading.load import load_model
from model_worker.runner import ModelRunner

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Document:
    """`answered` are the positions of tokens that the model should have said."""

    ids: NDArray[np.int64]
    answered: NDArray[np.int64]


@dataclass
class Score:
    tokens: int = 0
    loss: float = 0.0
    hits: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / self.tokens)

    @property
    def hit_share(self) -> float:
        return self.hits / self.tokens


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


def score(runner: ModelRunner, texts: Iterable[Document]) -> Score:
    """Each document alone, in one pass."""
    result = Score()
    for text in texts:
        length = np.array([len(text.ids)])
        table = np.arange(-(-len(text.ids) // BLOCK_SIZE), dtype=np.int32)[None]
        batch = ForwardBatch.build(text.ids, length, length, table, BLOCK_SIZE, text.answered - 1)
        logits, wanted = runner.backend.logits(batch).double(), torch.from_numpy(text.ids[text.answered])
        result.tokens += len(wanted)
        result.loss += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
        result.hits += int((logits.argmax(-1) == wanted).sum())
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.perplexity", description=__doc__)
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL_PATH, help="a model of the embedded one's making")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=100, help="held-out exchanges per skill")
    options = parser.parse_args(arguments)
    texts = list(documents(AutoTokenizer.from_pretrained(options.model), options.prompts))
    num_blocks = max(-(-len(text.ids) // BLOCK_SIZE) for text in texts)
    out = Table("weights", "perplexity", "greedy hits", "weights in memory", "predicted tokens")
    for quantization in QUANTIZATIONS:
        loaded = load_model(options.model, options.dtype, "cpu", lambda *_: None, quantization=quantization)
        result = score(ModelRunner(loaded, num_blocks, BLOCK_SIZE), texts)
        name = str(loaded.dtype).removeprefix("torch.") if quantization == "none" else quantization
        size = f"{loaded.parameter_bytes / 1e6:.2f} MB"
        out.add_row(name, f"{result.perplexity:.4f}", f"{result.hit_share:.2%}", size, str(result.tokens))
    Console().print(out)


if __name__ == "__main__":
    main()
