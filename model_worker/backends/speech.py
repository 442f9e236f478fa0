"""The decoder of a recogniser on a paged cache, whose cross-attention has its keys in the same blocks.

The first `clip_tokens` tokens of each sequence stand for its clip. Computing them writes the cross-attention's K and V
of all layers, made of the encoder's states; the tokens of the transcript follow, and attend both to these blocks and to
their own. So admission, chunks, prefix cache and recovery treat a clip as any prompt. In place of hidden states it
reports what the alignment heads attend to. Knows the layers of Whisper's decoder in transformers. Does not know
requests, rows or sampling.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from model_worker.attention import AttentionBackend
from model_worker.backends.base import Backend
from model_worker.batch import ForwardBatch
from model_worker.cpu.gemm.panel_linear import PanelLinear
from model_worker.kv_cache import AttentionParams, KVCache
from model_worker.model import LoadedModel
from shared.recogniser_files import alignment_heads

# Queries come scaled.
_PARAMS = AttentionParams(scale=1.0)


@dataclass(frozen=True, eq=False)
class _Views:
    """The transcript's tokens of a batch, as attention sees them: over their own keys, and over those of the clip.

    In `cross` each token is a sequence of its own, because it sees all keys. `kept` are their indices in the batch.
    """

    own: ForwardBatch
    cross: ForwardBatch
    kept: Tensor


class SpeechBackend(Backend):
    """The decoder of `loaded` on a cache, attending by `attend`."""

    def __init__(self, loaded: LoadedModel, cache: KVCache, attend: AttentionBackend) -> None:
        if loaded.clip_tokens % cache.block_size:
            raise ValueError(f"blocks of {cache.block_size} tokens do not divide the {loaded.clip_tokens} of a clip")
        model: Any = loaded.model
        self.device = loaded.device
        self.vocab_size = loaded.vocab_size
        self._cache = cache
        self._attend = attend
        self._clip_tokens = loaded.clip_tokens
        self._source_positions = int(model.config.max_source_positions)
        self._decoder = model.model.decoder
        self._head = model.proj_out
        self._dtype = loaded.dtype
        # Of products and attention. Other operations are so small that one core has done them before others wake.
        self._cores = torch.get_num_threads()
        self._heads_of = _heads_by_layer(model.generation_config)
        # Of the pass that runs: the tokens, by their places behind the clips, whose attention of the alignment heads is
        # wanted, and that attention [wanted tokens, positions], layer by layer; None: it is not wanted.
        self._aligned_of: Tensor | None = None
        self._aligned: list[Tensor] = []

    @property
    def gives_hidden_states(self) -> bool:
        return bool(self._heads_of)

    def hidden(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return the logits, and the attention of the alignment heads to the clip: [L, heads x positions].

        The heads are in the order of layers. A token of a clip has zeros. Only the L tokens of `logit_positions` have
        attention computed, so the memory does not grow with the other tokens of the batch.
        """
        behind = batch.positions >= self._clip_tokens
        wanted = behind[batch.logit_positions]
        places = behind.cumsum(0) - 1
        self._aligned_of = places[batch.logit_positions][wanted]
        try:
            logits = self.logits(batch)
            width = self._source_positions * sum(map(len, self._heads_of.values()))
            weights = torch.zeros(len(batch.logit_positions), width, device=self.device)
            if self._aligned:
                weights[wanted] = torch.cat(self._aligned, 1)
        finally:
            self._aligned_of = None
            self._aligned = []
        return logits, weights

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Return the logits; zeros for a token of a clip, which predicts nothing."""
        if batch.block_size != self._cache.block_size:
            raise ValueError(f"the batch has blocks of {batch.block_size} tokens, not {self._cache.block_size}")
        batch = batch.resolved()
        with torch.inference_mode(), _threads(1):
            of_clip = batch.positions < self._clip_tokens
            clip = of_clip.nonzero().squeeze(-1)
            if len(clip):
                self._write_clip(batch, clip)
            if len(clip) == batch.num_tokens:
                return torch.zeros(len(batch.logit_positions), self.vocab_size, device=self.device)
            views = self._views(batch, of_clip)
            states = self._states(views)
            if not len(clip):
                return self._product(self._head, states[batch.logit_positions]).float()
            place = torch.full((batch.num_tokens,), -1, device=self.device)
            place[views.kept] = torch.arange(len(views.kept), device=self.device)
            wanted = place[batch.logit_positions]
            computed = self._product(self._head, states[wanted.clamp(min=0)]).float()
            return torch.where((wanted >= 0)[:, None], computed, torch.zeros((), device=self.device))

    def _product(self, linear: Any, x: Tensor) -> Tensor:
        """Multiply by the weight of a linear module: on a CPU by our own kernel, which waits for no busy core."""
        # Codes in an order of their own are put in order by the module.
        if isinstance(linear, PanelLinear) and getattr(linear, "order", None) is None:
            return linear.multiply(x, self._cores)
        found: Tensor = linear(x)
        return found

    def _write_clip(self, batch: ForwardBatch, clip: Tensor) -> None:
        """Write the cross-attention's keys of the batch's clip tokens, which have these indices."""
        states = torch.zeros(batch.num_tokens, self._decoder.config.d_model, device=self.device)
        if batch.embeddings is not None:
            states[batch.embeddings[0]] = batch.embeddings[1]
        states = states[clip].to(self._dtype)
        written = replace(batch, slots=batch.slots[clip])
        for index, layer in enumerate(self._decoder.layers):
            attention = layer.encoder_attn
            self._cache.write(
                index,
                written,
                _heads(attention, self._product(attention.k_proj, states)),
                _heads(attention, self._product(attention.v_proj, states)),
            )

    def _views(self, batch: ForwardBatch, of_clip: Tensor) -> _Views:
        """Cut the clips out of a batch."""
        kept = (~of_clip).nonzero().squeeze(-1)
        size = batch.block_size
        first = torch.maximum(batch.kv_len - batch.query_start.diff(), torch.full_like(batch.kv_len, self._clip_tokens))
        counts = (batch.kv_len - first).clamp(min=0)
        has = counts > 0
        counts = counts[has]
        tables = batch.block_tables[has]
        own = replace(
            batch,
            tokens=batch.tokens[kept],
            positions=batch.positions[kept] - self._clip_tokens,
            query_start=torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)),
            kv_len=batch.kv_len[has] - self._clip_tokens,
            block_tables=tables[:, self._clip_tokens // size :].contiguous(),
            slots=batch.slots[kept],
            max_kv=batch.max_kv - self._clip_tokens,
        )
        alone = torch.arange(len(kept) + 1, dtype=torch.int32, device=self.device)
        cross = replace(
            own,
            query_start=alone,
            kv_len=torch.full_like(alone[1:], self._source_positions),
            block_tables=tables[:, : -(-self._source_positions // size)].repeat_interleave(counts.long(), 0),
            max_query=1,
            max_kv=self._source_positions,
        )
        return _Views(own, cross, kept)

    def _states(self, views: _Views) -> Tensor:
        """Return the decoder's last states of the transcript's tokens."""
        decoder = self._decoder
        # A token behind the last position is never served; a health probe may ask for one.
        positions = views.own.positions.clamp(max=decoder.max_target_positions - 1)
        states: Tensor = decoder.embed_tokens(views.own.tokens) + decoder.embed_positions.weight[positions]
        for index, layer in enumerate(decoder.layers):
            states = states + self._self_attention(index, layer, states, views.own)
            states = states + self._cross_attention(index, layer, states, views.cross)
            inner = layer.activation_fn(self._product(layer.fc1, layer.final_layer_norm(states)))
            states = states + self._product(layer.fc2, inner)
        last: Tensor = decoder.layer_norm(states)
        return last

    def _self_attention(self, index: int, layer: Any, states: Tensor, own: ForwardBatch) -> Tensor:
        attention = layer.self_attn
        normed = layer.self_attn_layer_norm(states)
        keys = _heads(attention, self._product(attention.k_proj, normed))
        values = _heads(attention, self._product(attention.v_proj, normed))
        self._cache.write(index, own, keys, values)
        return self._attended(index, attention, normed, own)

    def _cross_attention(self, index: int, layer: Any, states: Tensor, cross: ForwardBatch) -> Tensor:
        attention = layer.encoder_attn
        normed = layer.encoder_attn_layer_norm(states)
        if self._aligned_of is not None and len(self._aligned_of) and index in self._heads_of:
            self._aligned.append(self._alignment(index, attention, normed, cross, self._aligned_of))
        return self._attended(index, attention, normed, cross)

    def _alignment(self, index: int, attention: Any, normed: Tensor, cross: ForwardBatch, wanted: Tensor) -> Tensor:
        """Return what the alignment heads of a layer attend to: [wanted tokens, heads x positions]."""
        heads = self._heads_of[index]
        projected = self._product(attention.q_proj, normed[wanted])
        queries = _heads(attention, projected * attention.scaling)[:, heads].float()
        found = []
        for query, table in zip(queries, cross.block_tables[wanted].long(), strict=True):
            keys = self._cache.k[index][table].flatten(0, 1)[: self._source_positions, heads].float()
            found.append(torch.einsum("hd,khd->hk", query, keys).softmax(-1).flatten())
        return torch.stack(found)

    def _attended(self, index: int, attention: Any, normed: Tensor, batch: ForwardBatch) -> Tensor:
        queries = _heads(attention, self._product(attention.q_proj, normed) * attention.scaling)
        with _threads(self._cores):
            found = self._attend(queries, self._cache.k[index], self._cache.v[index], batch, _PARAMS)
        return self._product(attention.out_proj, found.flatten(1))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Have torch compute with so many threads in here."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _heads_by_layer(generation_config: Any) -> dict[int, list[int]]:
    """Return the alignment heads of each layer that has some, in the order of layers."""
    found: dict[int, list[int]] = {}
    for layer, head in sorted(alignment_heads(vars(generation_config))):
        found.setdefault(layer, []).append(head)
    return found


def _heads(attention: Any, projected: Tensor) -> Tensor:
    """Cut vectors [T, hidden] into heads [T, heads, width]."""
    heads: Tensor = projected.unflatten(1, (attention.num_heads, attention.head_dim))
    return heads
