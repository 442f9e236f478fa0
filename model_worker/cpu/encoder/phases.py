"""The layers of an encoder, for the tokens of several texts, in one compiled call.

A layer is a row of phases, as in cpu/fused/phases.py. Each is cut into pieces that the cores of a thread pool claim.
Few tokens are multiplied by every core with its share of the weights; of many, each core takes blocks through all of a
layer but attention. Where the texts are dealt into shares, a core takes a share through all layers by itself, and waits
for no other. Norms come after the sums, or before what is added to them. The residual and all sums are float32.
Indices are not checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from model_worker.cpu.encoder.attention import Nearness, attend, scratch_for
from model_worker.cpu.encoder.work import (
    DOWN_WEIGHT,
    GATE_WEIGHT,
    LAST_NORM_WEIGHT,
    NORM_WEIGHT,
    OUT_WEIGHT,
    UP_WEIGHT,
    EncoderBuffers,
    EncoderWork,
)
from model_worker.cpu.gemm.products import activated_product, add_product, halves_of
from model_worker.cpu.gemm.weight_format import HALVES, PANEL
from model_worker.cpu.simd.dot_bf16 import TILE_ROWS
from model_worker.cpu.simd.elements import INSIDE, MATH, borrowed, element, hold
from model_worker.cpu.threads import OVER, arrived_last, begin, phase_of, take, wait

# The phases of a layer. Of many tokens, OUT runs all that comes after attention, block by block.
QKV, ATTENTION, OUT, NORM, UP, DOWN, LAST_NORM, KINDS = range(8)
# Tokens of a block that one core takes through a layer, so few that they stay in its second-level cache.
BLOCK_TOKENS = 64
_GRAIN_ROWS = 4
# Norms of at most this many tokens run on one core: waking another takes longer.
_FEW_ROWS = 8


class _Own(NamedTuple):
    """The buffers that each core has for itself."""

    core: int
    first_inner: int  # its first row in `inner`
    weight_format: Any
    value_format: Any  # that of V: the same, unless V has scales of its own
    down_format: Any  # that of DOWN, whose operand has the widest range
    tile: NDArray[np.float32]
    other: NDArray[np.float32]  # a second tile, for gates
    scratch: Any


@njit(fastmath=MATH, error_model="numpy", nogil=True, cache=True, **INSIDE)
def _moments(values: Any, added: Any, epsilon: Any) -> Any:
    """Add a bias to a token's residual. Returns its mean, and what makes its deviation 1."""
    width = len(values)
    total = np.float32(0.0)
    for c in range(width):
        values[c] += added[c]
        total += values[c]
    mean = total / np.float32(width)
    squares = np.float32(0.0)
    for c in range(width):
        difference = values[c] - mean
        squares += difference * difference
    return mean, np.float32(1.0) / np.sqrt(squares / np.float32(width) + epsilon)


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _normalise(values: Any, added: Any, norms: Any, first: int, epsilon: Any, scales: Any, operand: Any) -> None:
    """Add a bias to a token's residual and normalise it, in place and, scaled, as an operand."""
    mean, share = _moments(values, added, epsilon)
    weight = norms[first]
    bias = norms[first + 1]
    for c in range(len(values)):
        value = (values[c] - mean) * share * weight[c] + bias[c]
        values[c] = value
        operand[c] = element(value * scales[c], operand)


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _write_normalised(values: Any, mean: Any, share: Any, norms: Any, first: int, scales: Any, operand: Any) -> None:
    """Write a token's residual as a normalised and scaled operand; itself it stays as it is."""
    weight = norms[first]
    bias = norms[first + 1]
    for c in range(len(values)):
        operand[c] = element(((values[c] - mean) * share * weight[c] + bias[c]) * scales[c], operand)


@njit(nogil=True, cache=True, **INSIDE)
def _scale(values: Any, scales: Any, operand: Any) -> None:
    """Write a token's normalised residual as another operand."""
    for c in range(len(values)):
        operand[c] = element(values[c] * scales[c], operand)


@njit(error_model="numpy", nogil=True, cache=True, **INSIDE)
def _norm_rows(kind: int, layer: int, block: Any, taken: Any, work: Any) -> None:
    """Norm some rows of a block, after attention or after the MLP."""
    weights = work.weights
    buffers = work.buffers
    added = weights.out_biases[layer] if kind == NORM else weights.down_biases[layer]
    norm = NORM_WEIGHT if kind == NORM else LAST_NORM_WEIGHT
    norms = weights.norms[layer]
    scales = weights.hidden_scales[layer, 0 if kind == NORM else 1]
    with_values = kind == LAST_NORM and len(weights.value_scales) > 0
    is_last = kind == LAST_NORM and weights.ends and layer == len(weights.panels) - 1
    for row in range(block[0] + taken[0], block[0] + taken[0] + taken[1]):
        x = work.x[row]
        if weights.norms_first and not is_last:
            mean, share = _moments(x, added, weights.epsilon)
            _write_normalised(x, mean, share, norms, norm, scales, buffers.hidden[row])
            if with_values:
                of_values = weights.value_scales[layer]
                _write_normalised(x, mean, share, norms, norm, of_values, buffers.of_values[row])
        else:
            _normalise(x, added, norms, norm, weights.epsilon, scales, buffers.hidden[row])
            if with_values:
                _scale(x, weights.value_scales[layer], buffers.of_values[row])


@njit(nogil=True, cache=True, **INSIDE)
def _project(layer: int, taken: Any, operand: Any, of_values: Any, out: Any, weights: Any, own: Any) -> None:
    """Multiply by some halves of panels of Q's, K's and V's weights, counted as if they lay in a row."""
    width = weights.out_biases.shape[1]
    halves = halves_of(width)
    for part in range(3):
        first = max(taken[0] - part * halves, 0)
        end = min(taken[0] + taken[1] - part * halves, halves)
        if first < end:
            some = (first, end - first)
            panels = weights.panels[layer, part]
            biases = weights.qkv_biases
            at = part * width
            if part == 2:
                value_format = own.value_format
                add_product(own.core, some, of_values, panels, width, out, at, biases, layer, value_format, own.tile)
            else:
                own_format = own.weight_format
                add_product(own.core, some, operand, panels, width, out, at, biases, layer, own_format, own.tile)


@njit(nogil=True, cache=True, **INSIDE)
def _pieces_in(kind: int, tokens: int, weights: Any) -> Any:
    """Return the number of pieces of a phase before or after attention."""
    if kind in (NORM, LAST_NORM):
        return tokens
    if kind == QKV:
        return 3 * halves_of(weights.out_biases.shape[1])
    return halves_of(weights.up_biases.shape[2] if kind == UP else weights.out_biases.shape[1])


@njit(inline="always")
def _do_part(kind: int, layer: int, block: Any, taken: Any, fresh: bool, work: Any, own: Any) -> None:
    """Run pieces of a phase for a block: its first token, its length, and its first row in `inner`."""
    first, count, at = block
    weights = work.weights
    buffers = work.buffers
    own_format = own.weight_format
    x = work.x[first : first + count]
    hidden = buffers.hidden[first : first + count]
    heads = buffers.heads[first : first + count]
    inner = buffers.inner[at : at + count]
    panels = weights.panels[layer]
    biases = weights.qkv_biases
    if kind == QKV:
        of_values = buffers.of_values[first : first + count]
        if fresh:
            own_format.prepare(hidden)
            if len(weights.value_scales) > 0:
                value_format = own.value_format
                value_format.prepare(of_values)
        _project(layer, taken, hidden, of_values, buffers.qkv[first : first + count], weights, own)
    elif kind == OUT:
        if fresh:
            own_format.prepare(heads)
        add_product(own.core, taken, heads, panels[OUT_WEIGHT], x.shape[1], x, 0, biases, -1, own_format, own.tile)
    elif kind == UP:
        if fresh:
            own_format.prepare(hidden)
        gate = panels[GATE_WEIGHT]
        up = panels[UP_WEIGHT]
        added = weights.up_biases[layer]
        scales = weights.inner_scales[layer]
        kind_of = weights.activation
        activated_product(
            own.core, taken, hidden, gate, up, added, kind_of, scales, inner, own_format, own.tile, own.other
        )
    elif kind == DOWN:
        down_format = own.down_format
        if fresh:
            down_format.prepare(inner)
        add_product(own.core, taken, inner, panels[DOWN_WEIGHT], x.shape[1], x, 0, biases, -1, down_format, own.tile)
    else:
        _norm_rows(kind, layer, block, taken, work)


@njit(inline="always")
def _do(kind: int, layer: int, taken: Any, fresh: bool, blocks: int, work: Any, own: Any) -> None:
    """Run the pieces of a phase that are `taken`; `fresh` if this core had none before.

    With `blocks`, the pieces of phases other than attention are that many blocks of tokens.
    """
    tokens = work.x.shape[0]
    if kind == ATTENTION:
        weights = work.weights
        buffers = work.buffers
        scales = weights.heads_scales[layer]
        table = weights.angles[layer]
        near = Nearness(weights.windows[layer], work.places.cos[table], work.places.sin[table], work.places.biases)
        qkv = buffers.qkv
        out = buffers.heads
        scale = weights.scale
        attend(taken, qkv, work.texts, work.seen, weights.heads, scale, scales, near, out, own.scratch, own.tile)
    else:
        end_part = LAST_NORM + 1 if kind == OUT and blocks > 0 else kind + 1
        for number in range(taken[0], taken[0] + (taken[1] if blocks > 0 else 1)):
            block = (0, tokens, 0)
            if blocks > 0:
                begins = tokens * number // blocks
                block = begins, tokens * (number + 1) // blocks - begins, own.first_inner
            for part in range(kind, end_part):
                some = (np.int64(0), np.int64(_pieces_in(part, block[1], work.weights))) if blocks > 0 else taken
                _do_part(part, layer, block, some, fresh or blocks > 0, work, own)


@njit(nogil=True, cache=True, **INSIDE)
def _blocks(tokens: int, cores: int) -> int:
    """Return the number of blocks into which many tokens are cut, as many for each core; 0 for few tokens."""
    return -(-tokens // (cores * BLOCK_TOKENS)) * cores if tokens >= cores * BLOCK_TOKENS else 0


@njit(nogil=True, cache=True, **INSIDE)
def _fill_sizes(sizes: Any, blocks: int, work: Any) -> None:
    """Fill in [kind, 2]: the pieces of a phase, and the pieces of a grain."""
    tokens = work.x.shape[0]
    weights = work.weights
    sizes[:, 1] = 1
    sizes[ATTENTION, 0] = (len(work.texts) - 1) * weights.heads
    if blocks > 0:
        sizes[QKV, 0] = sizes[OUT, 0] = blocks
    else:
        for kind in (QKV, OUT, NORM, UP, DOWN, LAST_NORM):
            sizes[kind, 0] = _pieces_in(kind, tokens, weights)
            sizes[kind, 1] = _GRAIN_ROWS if kind in (NORM, LAST_NORM) else HALVES


@njit(nogil=True, cache=True, **INSIDE)
def _is_short(kind: int, sizes: Any) -> bool:
    """Whether a phase is over before another core has woken for it."""
    pieces = sizes[kind, 0]
    return pieces == 0 or (kind in (NORM, LAST_NORM) and pieces <= _FEW_ROWS)


@njit(nogil=True, cache=True, **INSIDE)
def _run_layers(counter: Any, cores: int, together: bool, work: Any, own: Any) -> None:
    """Run a core's part of all layers if the cores run them `together`, else all of them on this core."""
    end = len(work.weights.panels) * KINDS
    sizes = np.zeros((KINDS, 2), np.int64)
    blocks = _blocks(work.x.shape[0], cores)
    _fill_sizes(sizes, blocks, work)
    phase: Any = phase_of(counter) if together else 0
    alone: Any = not together
    while phase < end:
        kind = phase % KINDS
        layer = phase // KINDS
        pieces, grain = sizes[kind]
        done: Any = 0
        taken = (np.int64(0), np.int64(pieces)) if alone else take(counter, phase, pieces, grain, own.core, cores)
        while taken[1] > 0:
            _do(kind, layer, taken, done == 0, blocks, work, own)
            done += taken[1]
            taken = (np.int64(0), np.int64(0)) if alone else take(counter, phase, pieces, grain, own.core, cores)
        if alone or (done > 0 and arrived_last(counter, done, pieces)):
            phase += 1
            if phase == end:
                phase = OVER
            alone = not together or (phase < end and _is_short(phase % KINDS, sizes))
            if not alone:
                begin(counter, phase)
        else:
            wait(counter, phase)
            phase = phase_of(counter)


@njit(nogil=True, cache=True, **INSIDE)
def _share_of(work: Any, first: int, end: int, core: int, cores: int) -> Any:
    """Return the work of the texts from `first` up to and without `end`, for this core."""
    begins = work.texts[first]
    ends = work.texts[end]
    buffers = work.buffers
    room = len(buffers.inner) // cores
    own = EncoderBuffers(
        buffers.hidden[begins:ends],
        buffers.of_values[begins:ends],
        buffers.qkv[begins:ends],
        buffers.heads[begins:ends],
        buffers.inner[core * room : (core + 1) * room],
    )
    texts = work.texts[first : end + 1] - begins
    seen = work.seen[first:end]
    return EncoderWork(work.x[begins:ends], texts, seen, work.longest, work.weights, own, work.places, work.like)


@njit(nogil=True, cache=True, **INSIDE)
def _run_shares(counter: Any, cores: int, shares: Any, work: Any, own: Any) -> None:
    """Run shares of the texts through all layers, as long as there are any. Core 0 waits until all are done."""
    pieces = len(shares) - 1
    done: Any = 0
    taken = take(counter, 0, pieces, 1, own.core, cores)
    while taken[1] > 0:
        for share in range(taken[0], taken[0] + taken[1]):
            some = _share_of(work, shares[share], shares[share + 1], own.core, cores)
            _run_layers(counter, 1, False, borrowed(some), own)
            hold(some)
        done += taken[1]
        taken = take(counter, 0, pieces, 1, own.core, cores)
    if done > 0 and arrived_last(counter, done, pieces):
        begin(counter, OVER)
    elif own.core == 0:
        wait(counter, 0)


@njit(nogil=True, cache=True)
def run_encoder(
    core: int, counter: Any, cores: int, work: Any, shares: Any, weight_format: Any, value_format: Any, down_format: Any
) -> None:
    """Run one core's part of a pass. `work.x` holds the embeddings, and so do `hidden` and `of_values`, scaled.

    `shares` are the first texts of the shares that cores take, and the number of texts: with one share they run it
    together. The buffers of formats begin with the core, where they have any.
    """
    counter = borrowed(counter)
    work = borrowed(work)
    tiles = np.empty((TILE_ROWS, PANEL), np.float32)
    other = np.empty((TILE_ROWS, PANEL), np.float32)
    scratch = scratch_for(work.longest, work.x.shape[1] // work.weights.heads, work.like)
    usual = borrowed(weight_format.of_core(core))
    of_values = borrowed(value_format.of_core(core))
    of_down = borrowed(down_format.of_core(core))
    together = len(shares) == 2
    first_inner = core * BLOCK_TOKENS if together else 0
    own = _Own(core, first_inner, usual, of_values, of_down, borrowed(tiles), borrowed(other), borrowed(scratch))
    if together:
        _run_layers(counter, cores, True, work, own)
    else:
        _run_shares(counter, cores, borrowed(shares), work, own)
    hold(tiles)
    hold(other)
    hold(scratch)


def most_layers() -> int:
    """Return the most layers that one call can have."""
    return OVER // KINDS - 1
