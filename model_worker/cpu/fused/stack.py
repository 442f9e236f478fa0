"""Runs a model that decoder_form.py recognises in one compiled call per forward pass.

Knows how a batch and the KV cache become the arguments of that call. Weights are not copied: the stack reads those that
the packed modules hold. A stack serves only after it has given the logits of the model's own forward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_worker.adapters.fitting import Adapter
from model_worker.batch import DeferredTokens, ForwardBatch
from model_worker.cpu.fused.adapters import PassAdapters, StackAdapters
from model_worker.cpu.fused.angles import Angles
from model_worker.cpu.fused.attention import Attention, Cache
from model_worker.cpu.fused.attention_plan import plan_for, zeros_after
from model_worker.cpu.fused.layer import Buffers, Residuals, levels_from
from model_worker.cpu.fused.pattern import DecoderWeights
from model_worker.cpu.fused.phases import (
    BLOCK_TOKENS,
    Inputs,
    Outputs,
    Work,
    run_stack,
)
from model_worker.cpu.fused.residuals import NO_RESIDUALS, KeptResiduals
from model_worker.cpu.gemm.bf12_format import Bf12Format, with_bf12
from model_worker.cpu.gemm.coded_format import coded_format
from model_worker.cpu.gemm.coded_linear import CodedLinear
from model_worker.cpu.gemm.int8_format import int8_format
from model_worker.cpu.gemm.packed_linear import PackedLinear
from model_worker.cpu.gemm.screened_head import SCREENED_ROWS, WORTH_SCREENING, Screen
from model_worker.cpu.gemm.weight_format import PANEL, WeightFormat
from model_worker.cpu.huge_pages import PagesAhead, keep_in_huge_pages
from model_worker.cpu.simd.argmax import ArgmaxBuffers
from model_worker.cpu.simd.bf12 import Bf12Panels, bf12_panels
from model_worker.cpu.simd.cache_dot import GROUP
from model_worker.cpu.simd.dot_bf16 import operand_dtype
from model_worker.cpu.simd.fixed_point import MOST_INPUTS, width_of
from model_worker.cpu.simd.kv_codes import FP8, IN_WORDS, INT8
from model_worker.cpu.simd.softmax import LOG2_E
from model_worker.cpu.threads import Job, thread_pool
from model_worker.cpu.tuning import EVERYTHING, Tuning
from model_worker.decoder_form import UnsupportedPattern
from model_worker.embedding_hooks import with_given
from model_worker.kv_cache import KVCache, memory_of
from shared.resources import free_memory

if TYPE_CHECKING:
    from model_worker.model import LoadedModel, TakeResiduals

log = logging.getLogger(__name__)

_NO_WINDOW = 1 << 40
_NO_PEAKS = np.empty((0, 0), np.int32)
# Smallest model, in weight bytes, that launches ahead: a pass must take over 1 ms.
WORTH_OVERLAPPING = 32 << 20
# Most tokens of a pass that reads bf12 weights: with more, arithmetic is the bottleneck, and bf12 takes more of it.
BF12_ROWS = 8
# Weight bytes from which on weights come from memory in each pass, and not from a cache.
WORTH_BF12 = 32 << 20
# Share of free memory that bf12 weights, which are a second copy, may take.
BF12_SHARE = 1 / 8
# Most bytes of the bf12 copy, exceptions included, over the bytes of the weights.
MOST_BF12 = 0.8


class _LaunchedPass(NamedTuple):
    """A launched pass: its results are there when `tokens` has returned."""

    batch: ForwardBatch
    job: Job
    outputs: Outputs
    residual: NDArray[np.float32]  # [T, hidden]
    screen: Screen | None
    adapters: PassAdapters
    kept: KeptResiduals | None
    residuals: Residuals

    def tokens(self) -> NDArray[np.int64]:
        """Help until the pass is over. Returns its tokens [L], -1 for one that is not finite."""
        self.job.finish()
        if self.screen is not None:
            self.screen.look_back()
        if self.kept is not None:
            self.kept.over(self.batch, self.residuals)
        return self.outputs.tokens


def fused_stack(loaded: LoadedModel, tuning: Tuning = EVERYTHING) -> FusedStack | None:
    """Make the stack of a model that matches the pattern and whose linear modules are packed, else log why not:
    None."""
    try:
        return FusedStack(loaded, tuning)
    except UnsupportedPattern as reason:
        log.info(
            "%s is not served by the fused stack but by transformers' modules, since %s", loaded.architecture, reason
        )
        return None


class Bf12Weights(NamedTuple):
    """The weights in bf12."""

    matrices: list[Bf12Panels]  # own the memory
    panels: NDArray[np.int64]  # as in Weights
    head: int


class FusedStack:
    """The weights of a model as one compiled call takes them, and buffers that grow with the largest batch."""

    def __init__(self, loaded: LoadedModel, tuning: Tuning = EVERYTHING) -> None:
        self._tuning = tuning
        decoder = DecoderWeights(loaded)
        # The modules own the memory that the addresses in `weights` point to.
        self._embedding = decoder.embedding
        self._table = decoder.embedding_table()
        self._coded_table = decoder.embedding_panels()
        self._modules = decoder
        self._vocab_size = loaded.vocab_size
        self._order = decoder.order
        self._layout = loaded.attention.layout.layers[0]
        self._q_heads = decoder.q_heads
        self._cores = torch.get_num_threads()
        able = self._cores > 1 and (self._table is not None or self._coded_table is not None)
        self._overlaps = tuning.overlap and able and decoder.weight_bytes >= WORTH_OVERLAPPING
        params = [loaded.attention.params[layer] for layer in decoder.order]
        self._scales = np.array([layer.scale * LOG2_E for layer in params], np.float32)
        self._windows = np.array([layer.sliding_window or _NO_WINDOW for layer in params], np.int64)
        self._weights = decoder.weights()
        self._widths = decoder.operand_widths()
        self._element = np.uint16 if loaded.dtype == torch.bfloat16 else np.float32
        self._adapters = StackAdapters(decoder, self._widths, self._element)
        self._screen: Screen | None = None
        self._bf12: Bf12Weights | None = None
        head = decoder.head.linear
        # Threads that make copies of weights. Passes give the same without them, so none waits for them.
        self._copies: list[Thread] = []
        fitting = isinstance(head, PackedLinear) and head.in_features <= MOST_INPUTS
        if tuning.screened_head and fitting and head.num_bytes >= WORTH_SCREENING:
            self._copy(Thread(target=self._make_screen, args=(head,), name="screen"))
        count = -(-self._vocab_size // PANEL)
        self._every_panel = np.concatenate([[count], np.arange(count)])
        elements = SCREENED_ROWS * width_of(self._widths[0])
        self._screen_format = int8_format(self._element, self._cores, SCREENED_ROWS, elements)
        self._room, self._format = self._make_room(1)
        has_bf12 = isinstance(self._format, Bf12Format) and tuning.bf12
        self._may_use_bf12 = has_bf12 and decoder.weight_bytes >= WORTH_BF12
        self._angles = Angles(decoder.rotary)
        self._kept: KeptResiduals | None = None
        self._caches: WeakKeyDictionary[KVCache, tuple[Cache, PagesAhead]] = WeakKeyDictionary()

    def _copy(self, thread: Thread) -> None:
        self._copies.append(thread)
        thread.start()

    def wait_for_copies(self) -> None:
        """Wait until the copies of weights are there that passes have asked for: for measurements and tests."""
        for thread in self._copies:
            thread.join()

    def _make_screen(self, head: PackedLinear) -> None:
        screen = Screen(head, self._vocab_size)
        self._weights = self._weights._replace(screen=int(screen.panels.ctypes.data), bounds=screen.bounds)
        self._screen = screen

    def _make_bf12(self) -> None:
        linears = self._modules.linears
        megabytes = sum(linear.num_bytes for linear in linears) >> 20
        if not has_room_for_bf12(self._modules.weight_bytes):
            log.info("weights are read as they are, %d MB: memory has no room for a bf12 copy", megabytes)
            return
        most_bytes = MOST_BF12 * sum(linear.num_bytes for linear in linears)
        matrices = bf12_panels([linear.panels.view(np.uint32) for linear in linears], most_bytes)
        if not matrices:
            log.info("weights are read as they are, %d MB: too many lie apart for a bf12 copy to pay", megabytes)
            return
        made = dict(zip(linears, matrices, strict=True))
        panels, head = self._modules.addresses(lambda linear: made[linear].panels)
        self._bf12 = Bf12Weights(list(made.values()), panels, head)
        bf12 = sum(matrix.num_bytes for matrix in made.values()) >> 20
        log.info("up to %d tokens at a time read bf12 weights, %d MB instead of %d", BF12_ROWS, bf12, megabytes)

    def close(self) -> None:
        """Let go of all weights. No pass is in flight, and none follows. Closing twice is harmless."""
        self._may_use_bf12 = False
        self.wait_for_copies()
        self._table = None
        self._coded_table = None
        self._screen = None
        self._bf12 = None

    @property
    def uses_bf12(self) -> bool:
        """Whether few tokens read bf12 weights from now on; for measurements and tests."""
        return self._bf12 is not None

    @property
    def screens(self) -> bool:
        """Whether lm_head is screened from now on; for measurements and tests."""
        return self._screen is not None

    def fits(self, block_size: int) -> bool:
        """Whether blocks of this size can be laid out as the kernels read them."""
        return block_size % GROUP == 0

    def add_adapter(self, handle: int, adapter: Adapter) -> int:
        """Keep an adapter for batches that name it. Returns its bytes. May run beside passes."""
        return self._adapters.add(handle, adapter)

    def drop_adapter(self, handle: int) -> None:
        """Forget an adapter."""
        self._adapters.drop(handle)

    def watch(self, layers: Sequence[int], take: TakeResiduals) -> None:
        """Give `take` the residual as it enters these layers, after each pass whose sequences have rows."""
        self._kept = KeptResiduals(layers, len(self._order), len(self._weights.final_norm), take)

    def logits(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Write the batch's tokens into the cache and return float32 logits [L, vocab] at `batch.logit_positions`."""
        return self._run(batch, cache, np.arange(len(batch.logit_positions)))[0]

    def greedy(
        self, batch: ForwardBatch, cache: KVCache, wanted: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], Tensor]:
        """Write the batch's tokens into the cache and return the argmax of each of the L rows.

        It is -1 where the logits are not finite. The second result is the logits of the rows `wanted`.
        """
        rows = np.where(wanted, np.cumsum(wanted) - 1, -1)
        logits, _, tokens = self._run(batch, cache, rows)
        return tokens, logits

    def hidden(self, batch: ForwardBatch, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Return the logits, and the hidden states that they were made of, float32 [L, hidden]."""
        logits, every_residual, _ = self._run(batch, cache, np.arange(len(batch.logit_positions)))
        residual = every_residual[batch.logit_positions]
        shares = torch.rsqrt(residual.square().mean(-1, keepdim=True) + float(self._weights.epsilon))
        return logits, residual * shares * torch.from_numpy(self._weights.final_norm)

    @property
    def overlaps(self) -> bool:
        """Whether passes may and should be launched before the tokens of the one before are read."""
        return self._overlaps

    def launch(self, batch: ForwardBatch, cache: KVCache, deferred: DeferredTokens) -> Callable[[], NDArray[np.int64]]:
        """Launch an argmax pass while the caller does something else.

        Returns what waits for its tokens [L], -1 for one that is not finite. The caller helps when it waits. Passes
        must be waited for in the order of their launch.
        """
        return self._launch(batch, cache, np.full(len(deferred.rows), -1), deferred).tokens

    def _run(
        self, batch: ForwardBatch, cache: KVCache, wanted: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor, NDArray[np.int64]]:
        """Run a pass. Returns logits of rows that have a place in `wanted`, the final residual [T, hidden], and the
        argmax."""
        none_deferred = DeferredTokens(np.full(batch.num_tokens, -1), np.full(len(wanted), -1), np.empty(0, np.int64))
        launched = self._launch(batch, cache, wanted, none_deferred)
        tokens = launched.tokens()
        return torch.from_numpy(launched.outputs.logits), torch.from_numpy(launched.residual), tokens

    def _launch(
        self, batch: ForwardBatch, cache: KVCache, wanted: NDArray[np.int64], deferred: DeferredTokens
    ) -> _LaunchedPass:
        if self._may_use_bf12:
            # Not before kernels may be called. Passes give the same without it.
            self._may_use_bf12 = False
            self._copy(Thread(target=self._make_bf12, name="bf12", daemon=True))
        largest = ArgmaxBuffers(self._cores, len(wanted))
        adapters = self._adapters.of_pass(batch, self._cores * BLOCK_TOKENS)
        screen = None if len(adapters.arrays.head_slots) else self._screen
        greedy = 0 < len(wanted) <= SCREENED_ROWS and int(wanted.max()) < 0
        if not greedy or (screen is not None and not screen.pays()):
            screen = None
        outputs = Outputs(
            logit_rows=batch.logit_positions.numpy(),
            wanted=wanted,
            logits=np.empty((int(wanted.max(initial=-1)) + 1, self._vocab_size), np.float32),
            keys=largest.keys,
            places=largest.places,
            tokens=largest.tokens,
            rows=deferred.rows,
            last_tokens=deferred.last_tokens,
            peaks=_NO_PEAKS if screen is None else screen.peaks[: len(wanted)],
            panels=self._every_panel if screen is None else screen.candidates,
        )
        inputs, x = self._embedded(batch, deferred)
        buffers = self._buffers(max(batch.num_tokens, len(wanted)))
        weights = self._weights
        weight_format = self._format
        few = max(batch.num_tokens, len(wanted)) <= BF12_ROWS
        if self._bf12 is not None and isinstance(weight_format, Bf12Format) and few:
            weights = weights._replace(panels=self._bf12.panels, head=self._bf12.head)
            weight_format = weight_format._replace(in_bf12=True)
        work = Work(
            inputs=inputs,
            x=x,
            rotary=self._angles.of(batch),
            weights=weights,
            cache=self._cache(batch, cache),
            attention=self._attention(batch),
            buffers=buffers,
            outputs=outputs,
            adapters=adapters.arrays,
            levels=levels_from(batch.embeddings, batch.num_tokens, x.shape[1]),
            residuals=NO_RESIDUALS if self._kept is None else self._kept.of_pass(batch),
        )
        job = thread_pool(self._cores).begin(run_stack, work, weight_format, self._screen_format)
        return _LaunchedPass(batch, job, outputs, x, screen, adapters, self._kept, work.residuals)

    def _embedded(self, batch: ForwardBatch, deferred: DeferredTokens) -> tuple[Inputs, NDArray[np.float32]]:
        """Return the tokens, and a buffer for their embeddings; filled, where the module must make them."""
        tokens = batch.tokens.numpy()
        table = np.empty((0, 0), self._element) if self._table is None else self._table
        coded = self._coded_table
        if batch.embeddings is None and (len(table) or coded is not None):
            x = np.empty((len(tokens), len(self._weights.final_norm)), np.float32)
            panels = 0 if coded is None else coded.panels.ctypes.data
            return Inputs(tokens, deferred.unread, deferred.last_tokens, table, panels), x
        if coded is None:
            x = self._embedding(batch.tokens).to(torch.float32).numpy()
        else:
            # Exact, as a token has it that comes without vectors beside.
            x = with_given(coded.rows(batch.tokens), batch).numpy()
        return Inputs(tokens, deferred.unread, deferred.last_tokens, table[:0], 0), x

    def _cache(self, batch: ForwardBatch, cache: KVCache) -> Cache:
        if cache not in self._caches:
            k, v = ([memory_of(blocks[layer]) for layer in self._order] for blocks in (cache.k, cache.v))
            keep_in_huge_pages([*k, *v], written=False)
            shape = self._layout
            nothing = np.empty(0, np.int64)
            dtype = cache.layout.dtype
            kind = IN_WORDS if not cache.layout.in_codes else INT8 if dtype == torch.int8 else FP8
            known = Cache(
                k=np.array([array.ctypes.data for array in k]),
                v=np.array([array.ctypes.data for array in v]),
                like=np.empty(1, self._element),
                kind=kind,
                kv_heads=shape.kv_heads,
                block_size=cache.block_size,
                k_dim=shape.k_dim,
                v_dim=shape.v_dim,
                blocks=nothing,
                offsets=nothing,
                unused=nothing,
            )
            self._caches[cache] = known, PagesAhead([*k, *v])
        known, ahead = self._caches[cache]
        blocks, offsets = np.divmod(batch.slots.numpy(), batch.block_size)
        ahead.use(int(blocks.max()))
        return known._replace(blocks=blocks, offsets=offsets, unused=zeros_after(batch, offsets))

    def _attention(self, batch: ForwardBatch) -> Attention:
        layer = self._layout
        cascade = self._tuning.cascade_attention
        plan = plan_for(batch, layer.kv_heads, self._q_heads // layer.kv_heads, self._cores, cascade)
        tables = batch.block_tables.numpy()
        return Attention(tables, plan.tiles, plan.members, plan.units, self._scales, self._windows)

    def _buffers(self, tokens: int) -> Buffers:
        if tokens > len(self._room.q):
            self._room, self._format = self._make_room(max(tokens, 2 * len(self._room.q)))
        return Buffers(*(array[:tokens] for array in self._room))

    def _make_room(self, tokens: int) -> tuple[Buffers, WeightFormat]:
        layer = self._layout
        hidden, heads, inner = self._widths
        of_attention = operand_dtype(self._element)
        at_a_time = min(tokens, self._cores * BLOCK_TOKENS)
        elements = max(at_a_time * width_of(max(self._widths)), tokens * width_of(hidden))
        head_linear = self._modules.head.linear
        if isinstance(head_linear, CodedLinear):
            operand = np.dtype(head_linear.operand_element)
            weight_format: WeightFormat = coded_format(self._cores, tokens, elements, max(self._widths))
        else:
            operand = of_attention
            weight_format = with_bf12(head_linear.weight_format(self._cores, tokens, elements))
        buffers = Buffers(
            hidden=np.zeros((tokens, hidden), operand),
            qkv=np.zeros((at_a_time, self._weights.biases.shape[1]), np.float32),
            q=np.zeros((tokens, self._q_heads, layer.k_dim), of_attention),
            keys=np.zeros((at_a_time, layer.kv_heads * layer.k_dim), self._element),
            heads=np.zeros((tokens, heads), operand),
            inner=np.zeros((at_a_time, inner), operand),
        )
        return buffers, weight_format


def has_room_for_bf12(weight_bytes: int) -> bool:
    """Whether a bf12 copy of so many bytes of weights is a small part of the memory that is left."""
    return MOST_BF12 * weight_bytes <= BF12_SHARE * free_memory()
