"""A whole stack of decoder layers in one compiled call, from embeddings to logits.

Knows arrays as layer.py and attention.py do. A pass is a row of phases; each is cut into pieces that the cores of a
thread pool claim, and short phases are left to one core. Few tokens are multiplied by every core with its share of the
weights; of many tokens each core takes some at a time through all of a layer but attention.

Indices are not checked: one out of range corrupts memory. Does not know which models match this pattern
(decoder_form.py does).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from model_worker.cpu.fused.attention import Attention, Cache, attend, attention_scratch
from model_worker.cpu.fused.layer import (
    INNER,
    INNER_RANKS,
    MLP_NORM,
    MLP_OUT,
    MLP_OUT_RANKS,
    NORM,
    OUT,
    OUT_RANKS,
    PARTS,
    PLACE,
    QKV,
    QKV_RANKS,
    RANKS_PARTS,
    Adapters,
    Buffers,
    Levels,
    Residuals,
    Weights,
    do_part,
    every,
    keep_residual,
    normalise,
    pieces_in,
)
from model_worker.cpu.gemm.coded_rows import fill_row
from model_worker.cpu.gemm.low_rank import LowRank, add_embedding, fill_ranks
from model_worker.cpu.gemm.products import HEAD_PANELS, argmax_product
from model_worker.cpu.gemm.screened_head import choose, screen
from model_worker.cpu.gemm.weight_format import HALVES, PANEL
from model_worker.cpu.simd.argmax import reduce_argmax
from model_worker.cpu.simd.dot_bf16 import TILE_ROWS
from model_worker.cpu.simd.elements import INSIDE, borrowed, hold, widened
from model_worker.cpu.threads import OVER, arrived_last, begin, phase_of, take, wait

# The kinds of phases, beside the parts of a layer. For many tokens, all parts before or after attention run at once,
# block by block; the single parts have no pieces then. FINAL_NORM to REDUCE_ARGMAX are the end of a pass.
PRE_ATTENTION, ATTENTION, POST_ATTENTION, BEGIN, FINAL_NORM, HEAD_RANKS, SCREEN, CHOOSE, HEAD, REDUCE_ARGMAX, KINDS = (
    range(PARTS, PARTS + 11)
)
NO_LAYER = 1 + KINDS - FINAL_NORM
LAYER = (
    *(NORM, QKV_RANKS, QKV, PLACE, PRE_ATTENTION, ATTENTION),
    *(OUT_RANKS, OUT, MLP_NORM, INNER_RANKS, INNER, MLP_OUT_RANKS, MLP_OUT, POST_ATTENTION),
)
# Tokens of a block that one core takes through a layer: few enough that their buffers stay in its second-level cache,
# enough that weights, which each core then reads for itself, do not hold it up.
BLOCK_TOKENS = 64
# Rows in a grain of work that is done token by token.
GRAIN_ROWS = 4
# Phases with at most this many tokens run on one core: waking another takes longer.
FEW_ROWS = 2
# Pieces of adapters that are as short.
FEW_BLOCKS = 4


class Inputs(NamedTuple):
    """The tokens of a pass. Rows whose last token another pass draws are read when this one begins."""

    tokens: NDArray[np.int64]  # [T]
    rows: NDArray[np.int64]  # [T]: whose last token stands for this one; -1: none
    last_tokens: NDArray[np.int64]  # [rows]
    table: NDArray[Any]  # [vocabulary, hidden]: embeddings; or nothing if they are in panels or in x already
    panels: int  # the address of panels of codes that hold the table; 0: none


class Outputs(NamedTuple):
    """The results of a pass; `wanted` to `tokens` are as in `argmax_product` and `reduce_argmax`."""

    logit_rows: NDArray[np.int64]  # [L]: tokens whose logits are needed, in any order, some of them twice perhaps
    wanted: NDArray[np.int64]  # [L]
    logits: NDArray[np.float32]
    keys: NDArray[np.int32]  # [cores, L]
    places: NDArray[np.int64]  # [cores, L]
    tokens: NDArray[np.int64]  # [L]
    rows: NDArray[np.int64]  # [L]: whose last token this will be; -1: none
    last_tokens: NDArray[np.int64]  # [rows]
    peaks: NDArray[np.int32]  # [L, panels of lm_head], as screened_head.py knows them, or nothing: not screened
    panels: NDArray[np.int64]  # [1 + panels]: how many of lm_head's panels are multiplied, and which


class Rotary(NamedTuple):
    """The angles of rotary positions, and the index of each token's."""

    cos: NDArray[np.float32]  # [n, rotated elements]
    sin: NDArray[np.float32]
    rows: NDArray[np.int64]  # [T]


class Work(NamedTuple):
    """The arguments of a forward pass."""

    inputs: Inputs
    x: NDArray[np.float32]  # [T, hidden]: the residual, from the embeddings on
    rotary: Rotary
    weights: Weights
    cache: Cache
    attention: Attention
    buffers: Buffers
    outputs: Outputs
    adapters: Adapters
    levels: Levels
    residuals: Residuals


class Own(NamedTuple):
    """The buffers that each core has for itself."""

    core: int
    weight_format: Any  # with the core's own buffers
    screen_format: Any  # of lm_head's screen, which is int8 in any case
    tile: NDArray[np.float32]  # [TILE_ROWS, PANEL]
    bits: NDArray[np.int32]  # the same memory
    other: NDArray[np.float32]
    attention: Any  # as `attention_scratch` makes it


@njit(nogil=True, cache=True, **INSIDE)
def _embed(number: int, work: Any, own: Any) -> None:
    """Write the embedding of one token, widened, with what its adapter adds."""
    inputs = work.inputs
    adapters = work.adapters
    row = inputs.rows[number]
    token = inputs.tokens[number] if row < 0 else max(0, inputs.last_tokens[row])
    to = work.x[number]
    if len(inputs.table):
        vector = inputs.table[token]
        for c in range(len(to)):
            to[c] = widened(vector[c])
    elif inputs.panels:
        fill_row(inputs.panels, token, to)
    if len(adapters.embedding_slots) and adapters.embedding_slots[number] >= 0:
        slot = adapters.embedding_slots[number]
        add_embedding(slot, adapters.embeddings, adapters.like, token, to, own.tile, own.other)
    keep_residual(0, number, work.x[number : number + 1], 0, len(to), work.residuals)


@njit(nogil=True, cache=True, **INSIDE)
def _kind(phase: int, layers: int) -> Any:
    """Return the kind of a phase, and its layer."""
    if phase == 0:
        return BEGIN, 0
    if phase <= layers * len(LAYER):
        return LAYER[(phase - 1) % len(LAYER)], (phase - 1) // len(LAYER)
    return phase - 1 - layers * len(LAYER) + FINAL_NORM, 0


@njit(nogil=True, cache=True, **INSIDE)
def _blocks(tokens: int, cores: int) -> int:
    """Return the number of blocks into which many tokens are cut, as many for each core; 0 for few tokens."""
    return -(-tokens // (cores * BLOCK_TOKENS)) * cores if tokens >= cores * BLOCK_TOKENS else 0


@njit(nogil=True, cache=True, **INSIDE)
def _fill_sizes(sizes: Any, cores: int, work: Any) -> None:
    """Fill in [kind, 2]: the pieces of a phase, and the pieces of a grain."""
    outputs = work.outputs
    tokens = work.x.shape[0]
    wanted = len(outputs.logit_rows)
    blocks = _blocks(tokens, cores)
    sizes[PRE_ATTENTION, 0] = sizes[POST_ATTENTION, 0] = blocks
    for part in range(PARTS):
        sizes[part, 0] = pieces_in(part, tokens, work) if blocks == 0 else 0
    sizes[ATTENTION, 0] = len(work.attention.units)
    sizes[BEGIN, 0] = tokens
    sizes[FINAL_NORM, 0] = wanted
    sizes[HEAD_RANKS, 0] = len(work.adapters.head_slots) * work.adapters.blocks[len(RANKS_PARTS)]
    sizes[SCREEN, 0] = outputs.peaks.size // max(wanted, 1)
    sizes[HEAD, 0] = len(outputs.panels) - 1 if wanted else 0
    sizes[CHOOSE, 0] = min(outputs.peaks.size, 1)
    sizes[REDUCE_ARGMAX, 0] = 1
    sizes[:, 1] = GRAIN_ROWS
    sizes[QKV, 1] = sizes[OUT, 1] = sizes[INNER, 1] = sizes[MLP_OUT, 1] = HALVES
    sizes[PRE_ATTENTION, 1] = sizes[POST_ATTENTION, 1] = sizes[ATTENTION, 1] = 1
    sizes[SCREEN, 1] = sizes[HEAD, 1] = HEAD_PANELS


@njit(nogil=True, cache=True, **INSIDE)
def _is_short(phase: int, layers: int, tokens: int, sizes: Any) -> Any:
    """Whether a phase is over before another core has woken for it."""
    kind = _kind(phase, layers)[0]
    pieces = sizes[kind, 0]
    few = tokens if kind == PLACE else pieces
    by_rows = kind in (BEGIN, NORM, PLACE, MLP_NORM, FINAL_NORM)
    if kind in RANKS_PARTS or kind == HEAD_RANKS:
        return pieces <= FEW_BLOCKS
    return pieces == 0 or kind in (CHOOSE, REDUCE_ARGMAX) or (by_rows and few <= FEW_ROWS)


@njit(nogil=True, cache=True, **INSIDE)
def _reduce_argmax(outputs: Any) -> None:
    """Reduce the argmax of all cores, and write the tokens as the last ones of their rows."""
    tokens = outputs.tokens
    reduce_argmax(outputs.keys, outputs.places, tokens)
    for row in range(len(outputs.rows)):
        if outputs.rows[row] >= 0:
            outputs.last_tokens[outputs.rows[row]] = tokens[row]


@njit(inline="always")
def _do(kind: int, layer: int, taken: Any, fresh: bool, pieces: int, work: Any, own: Any) -> None:
    """Run the pieces of a phase that are `taken`: the first, and their number; `fresh` if this core had none before."""
    first = taken[0]
    end = taken[0] + taken[1]
    x = work.x
    heads = work.buffers.heads
    weights = work.weights
    outputs = work.outputs
    hidden = work.buffers.hidden
    tokens = x.shape[0]
    if kind < PARTS or kind in (PRE_ATTENTION, POST_ATTENTION):
        blocks = end - first
        first_part = NORM if kind == PRE_ATTENTION else OUT_RANKS
        end_part = OUT_RANKS if kind == PRE_ATTENTION else PARTS
        if kind < PARTS:
            blocks = 1
            first_part = kind
            end_part = kind + 1
        for number in range(first, first + blocks):
            block = (0, tokens, 0)
            every_piece = kind >= PARTS
            if every_piece:
                begins = tokens * number // pieces
                ends = tokens * (number + 1) // pieces
                block = begins, ends - begins, own.core * BLOCK_TOKENS
            for part in range(first_part, end_part):
                some = every(pieces_in(part, block[1], work)) if every_piece else taken
                do_part(part, layer, block, some, fresh or every_piece, x, heads, work, own)
    elif kind == ATTENTION:
        attend(layer, taken, work.buffers.q, work.cache, work.attention, own.attention, heads)
    elif kind == BEGIN:
        for token in range(first, end):
            _embed(token, work, own)
    elif kind == FINAL_NORM:
        for row in range(first, end):
            normalise(x, outputs.logit_rows[row], weights.final_norm, weights.epsilon, hidden, row)
    elif kind == HEAD_RANKS:
        adapters = work.adapters
        table = adapters.inputs[:, len(weights.panels), 0]
        fill_ranks(taken, hidden, adapters.head_slots, table, adapters.like, adapters.head_ranks)
    elif kind == SCREEN:
        screen_format = own.screen_format
        width = outputs.logits.shape[1]
        if fresh:
            screen_format.prepare(hidden[: len(outputs.peaks)])
        screen(taken, hidden, screen_format, weights.screen, width, outputs.peaks, own.tile, own.bits)
    elif kind == CHOOSE:
        choose(hidden, weights.bounds, outputs.peaks, outputs.panels)
    elif kind == HEAD:
        numbers = outputs.panels[1 : 1 + pieces]
        keys = outputs.keys[own.core]
        places = outputs.places[own.core]
        wanted = outputs.wanted
        logits = outputs.logits
        tile = own.tile
        weight_format = own.weight_format
        adapters = work.adapters
        table = adapters.outputs[:, len(weights.panels), 0]
        to_head = LowRank(adapters.head_slots, adapters.head_ranks, table, adapters.like)
        if fresh:
            weight_format.prepare(hidden[: len(wanted)])
        argmax_product(
            taken, numbers, hidden, weights.head, wanted, logits, keys, places, weight_format, tile, own.bits, to_head
        )
    elif kind == REDUCE_ARGMAX:
        _reduce_argmax(outputs)


@njit(nogil=True, cache=True)
def run_stack(core: int, counter: Any, work: Any, weight_format: Any, screen_format: Any) -> None:
    """Run one core's part of a forward pass.

    The buffers of both formats begin with the core, where they have any.
    """
    counter = borrowed(counter)
    work = borrowed(work)
    layers = len(work.weights.panels)
    cores = len(work.outputs.keys)
    tokens = work.x.shape[0]
    end = layers * len(LAYER) + NO_LAYER
    tiles = np.empty((2, TILE_ROWS, PANEL), np.float32)
    scratch = attention_scratch(work.buffers.q, work.cache, work.attention)
    tile = borrowed(tiles)[0]
    other = borrowed(tiles)[1]
    own_format = borrowed(weight_format.of_core(core))
    own_screen = borrowed(screen_format.of_core(core))
    own = Own(core, own_format, own_screen, tile, tile.view(np.int32), other, borrowed(scratch))
    sizes = np.zeros((KINDS, 2), np.int64)
    _fill_sizes(sizes, cores, work)
    phase = phase_of(counter)
    alone = False
    while phase < end:
        kind, layer = _kind(phase, layers)
        pieces, grain = sizes[kind]
        if kind == HEAD:
            pieces = work.outputs.panels[0]
        done = 0
        taken = every(pieces) if alone else take(counter, phase, pieces, grain, core, cores)
        while taken[1] > 0:
            _do(kind, layer, taken, done == 0, pieces, work, own)
            done += taken[1]
            taken = every(0) if alone else take(counter, phase, pieces, grain, core, cores)
        if alone or (done > 0 and arrived_last(counter, done, pieces)):
            phase += 1
            # A short phase is not worth waking the other cores.
            alone = phase < end and _is_short(phase, layers, tokens, sizes)
            if not alone:
                begin(counter, phase if phase < end else OVER)
        else:
            wait(counter, phase)
            phase = phase_of(counter)
    hold(tiles)
    hold(scratch)
