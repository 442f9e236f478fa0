"""Verifies at load that a model gives the same logits on the paged KV cache as with its own attention.

Two short sequences go through the model's eager attention in one piece, and through ours in chunks that share a forward
pass and a shuffled block table. A layer that keeps state of its own, ignores positions, mixes neighbouring tokens or
needs an argument we do not pass gives other logits, whatever its architecture calls it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from model_worker.batch import ForwardBatch
from model_worker.host_memory import trim_heap
from model_worker.loading.probe import PROBE_TOKENS
from model_worker.model import ModelRefused
from model_worker.runner import ModelRunner

if TYPE_CHECKING:
    from model_worker.model import LoadedModel

# The second chunk of the first sequence is short, so that a state lost at the chunk's edge shows in most of its logits.
FIRST_CHUNK = PROBE_TOKENS - 4
BLOCK_SIZE = 4
STACK_BLOCK_SIZE = 16  # the least that the fused stack takes
BLOCK_TABLES = np.array([[5, 0, 3], [2, 6, 1]], np.int32)
# Relative error of a logits row. Rounding differs with the shape of a batch, and in half precision it may send a token
# to another expert, so the rows' median counts; a real defect moves it by far more.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.15}


def tokens(config: PreTrainedConfig, device: torch.device) -> Tensor:
    """Return two sequences of ordinary tokens, the same ones each time."""
    draws = torch.randint(0, config.vocab_size, (16 * PROBE_TOKENS,), generator=torch.Generator().manual_seed(0))
    # Padding has an embedding of its own kind, and some models treat it as absent. Not every config has the attribute.
    padding = getattr(config, "pad_token_id", None)
    ordinary = draws[draws != (-1 if padding is None else padding)]
    return ordinary[: 2 * PROBE_TOKENS].view(2, PROBE_TOKENS).to(device)


def eager_logits(model: PreTrainedModel, tokens: Tensor, first_position: int | None = None) -> Tensor:
    """Return logits [2, n, vocab] as transformers computes them. Leaves the model with eager attention.

    Without a first position the model counts by itself, so that one with its own way of counting is found out.
    """
    model.set_attn_implementation("eager")
    positions = None
    if first_position is not None:
        positions = first_position + torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    logits: Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return logits


def check_paged(
    loaded: LoadedModel, tokens: Tensor, expected: Tensor, attention: str = "reference", block_size: int = BLOCK_SIZE
) -> None:
    """Compare the paged forward pass with `expected`; refuse the model if they differ."""
    rows = len(BLOCK_TABLES)
    backend = ModelRunner(loaded, num_blocks=8, block_size=block_size, attention=attention, max_rows=rows).backend
    first, second = tokens.cpu().numpy()

    def forward(chunks: list[np.ndarray], kv_lens: list[int], tables: np.ndarray) -> Tensor:
        packed = np.concatenate(chunks)
        lens = np.array([len(chunk) for chunk in chunks])
        every = np.arange(len(packed))
        shape = tables, block_size, every, loaded.device
        # Sequences keep their rows, where recurrent layers have their states.
        batch = ForwardBatch.build(packed, lens, np.array(kv_lens), *shape, rows=np.arange(len(chunks)))
        return backend.logits(batch)

    def agree(name: str, got: Tensor, want: Tensor) -> None:
        error = median_error(got, want)
        if not error < TOLERANCE[loaded.dtype]:
            raise ModelRefused(
                loaded.architecture,
                f"on the paged KV cache {name} gives other logits than the model's own attention "
                f"(relative error {error:.2g}), so some layer keeps a state or uses positions in its own way",
            )

    # One pass after the other: logits of both are much memory.
    agree("one sequence", forward([first[:FIRST_CHUNK]], [FIRST_CHUNK], BLOCK_TABLES[:1]), expected[0, :FIRST_CHUNK])
    trim_heap()
    rest = forward([first[FIRST_CHUNK:], second], [PROBE_TOKENS, PROBE_TOKENS], BLOCK_TABLES)
    split = PROBE_TOKENS - FIRST_CHUNK
    agree("a sequence in two chunks", rest[:split], expected[0, FIRST_CHUNK:])
    agree("a sequence packed beside another", rest[split:], expected[1])
    if loaded.recurrent is not None:
        # Recurrent layers compute one token in another way than several.
        last = PROBE_TOKENS - 1
        forward([first[:last], second[:last]], [last, last], BLOCK_TABLES)
        single = forward([first[last:], second[last:]], [PROBE_TOKENS, PROBE_TOKENS], BLOCK_TABLES)
        agree("one token of each sequence", single, expected[:, last])


def far_stack_differs(loaded: LoadedModel, tokens: Tensor) -> bool:
    """Whether the fused stack gives other logits than the model near the last position.

    Some models treat positions beyond those they were first trained on in a way of their own. One pass has half of the
    tokens of both sequences: logits of more rows are much memory.
    """
    half = PROBE_TOKENS // 2
    first = max(0, (loaded.max_position or 0) - half)
    # The C library keeps the logits that were compared, and more come.
    trim_heap()
    tokens = tokens[:, :half]
    with torch.inference_mode():
        want = eager_logits(loaded.model, tokens, first)
    lengths = np.array([half, half])
    near = ForwardBatch.build(
        tokens.flatten().numpy(), lengths, lengths, BLOCK_TABLES, STACK_BLOCK_SIZE, np.arange(2 * half)
    )
    backend = ModelRunner(loaded, 8, STACK_BLOCK_SIZE, "cpu").backend
    got = backend.logits(replace(near, positions=near.positions + first))
    return not median_error(got, want) < TOLERANCE[loaded.dtype]


def plain_logits(loaded: LoadedModel, tokens: Tensor) -> Tensor:
    """Return the logits [2, n, vocab] of the model's modules on a paged cache, with attention in plain torch."""
    rows = len(BLOCK_TABLES)
    backend = ModelRunner(loaded, 8, BLOCK_SIZE, attention="reference", max_rows=rows).backend
    lens = np.array([PROBE_TOKENS, PROBE_TOKENS])
    every = np.arange(tokens.numel())
    packed = tokens.cpu().flatten().numpy()
    batch = ForwardBatch.build(packed, lens, lens, BLOCK_TABLES, BLOCK_SIZE, every, loaded.device)
    logits: Tensor = backend.logits(batch).unflatten(0, tokens.shape).clone()
    return logits


def stack_differs(loaded: LoadedModel, tokens: Tensor, expected: Tensor) -> bool:
    """Whether the fused stack gives other logits than `expected`, near the first position."""
    try:
        check_paged(loaded, tokens, expected, "cpu", STACK_BLOCK_SIZE)
    except ModelRefused:
        return True
    return False


def rows_are_invariant(loaded: LoadedModel, tokens: Tensor) -> bool:
    """Whether a token gets the same logits, bit for bit, whatever else is in its pass and however its prompt is cut.

    In layers with a window sums begin where the window of a piece's first token does, so cuts change them.
    """
    longest = loaded.max_position or math.inf
    if any((layer.sliding_window or math.inf) < longest for layer in loaded.attention.params):
        return False
    backend = ModelRunner(loaded, num_blocks=8, block_size=STACK_BLOCK_SIZE, attention="cpu").backend
    sequences = tokens.numpy()

    def forward(tables: np.ndarray, *chunks: tuple[int, int, int]) -> Tensor:
        """Compute for each chunk (sequence, first, end) these tokens; the earlier ones are in the cache."""
        packed = np.concatenate([sequences[one, first:end] for one, first, end in chunks])
        lens = np.array([end - first for _, first, end in chunks])
        ends = np.array([end for _, _, end in chunks])
        tables = tables[[one for one, _, _ in chunks]]
        every = np.arange(len(packed))
        return backend.logits(ForwardBatch.build(packed, lens, ends, tables, STACK_BLOCK_SIZE, every))

    cut = PROBE_TOKENS // 2
    whole = forward(BLOCK_TABLES, (0, 0, PROBE_TOKENS), (1, 0, PROBE_TOKENS)).split(PROBE_TOKENS)
    passes: tuple[tuple[tuple[int, int, int], ...], ...] = (
        ((0, 0, cut),),
        ((1, 0, cut), (0, cut, cut + 1)),
        ((0, cut + 1, cut + 2),),
        ((0, cut + 2, PROBE_TOKENS), (1, cut, cut + 1)),
    )

    def agrees(chunks: tuple[tuple[int, int, int], ...]) -> bool:
        parts = forward(BLOCK_TABLES[::-1], *chunks).split([end - first for _, first, end in chunks])
        return all(
            torch.equal(part, whole[one][first:end]) for part, (one, first, end) in zip(parts, chunks, strict=True)
        )

    # One after the other: each reads what those before it have written, and logits of all would be much memory.
    return all(agrees(chunks) for chunks in passes)


def are_finite(logits: Tensor) -> bool:
    """Whether all of logits [.., vocab] are finite. A row at a time: torch makes several tensors of their size."""
    return all(bool(row.isfinite().all()) for row in logits.flatten(0, -2))


def median_error(got: Tensor, want: Tensor) -> float:
    """Return the median over rows of |got - want| / |want|."""
    return float(_row_errors(got.flatten(0, -2), want.flatten(0, -2)).median())


def largest_error(got: Tensor, want: Tensor) -> float:
    """Return the largest |got - want| / |want| of all rows."""
    return float(_row_errors(got.flatten(0, -2), want.flatten(0, -2)).max())


@torch.no_grad()
def _row_errors(got: Tensor, want: Tensor) -> Tensor:
    """Return |got - want| / |want| of each row, by one tensor of a row's size: logits of many rows are much memory."""
    difference = torch.empty(got.shape[-1], dtype=torch.float32, device=got.device)
    errors = []
    for one, other in zip(got, want, strict=True):
        # In float32: a difference of two of half precision would be rounded.
        difference.copy_(one).sub_(other)
        size = torch.linalg.vector_norm(other, dtype=torch.float32).clamp_min(1e-6)
        errors.append(difference.norm() / size)
    return torch.stack(errors)
