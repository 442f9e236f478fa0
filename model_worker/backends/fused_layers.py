"""The layers of a decoder on a GPU in ten launches each: four products, attention, and kernels for all between them.

For models of the form that decoder_form.py knows, of linear modules that are plain, in FP8, or in four or eight bits.
Parameters stay those of the modules, which compute what this does not take: some adapters, and tokens that see later
ones. Knows how a batch and the cache are put to kernels (cuda/). Whether it gives the modules' logits is for
loading/gpu_layers.py to find out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from model_worker.attention import AttentionBackend
from model_worker.batch import ForwardBatch
from model_worker.cuda.fp8_blocks import BlockFp8Linear
from model_worker.cuda.fp8_linear import Fp8Linear
from model_worker.cuda.grouped_linear import GroupedLinear
from model_worker.cuda.joined_linear import Change, JoinedLinear
from model_worker.decoder_form import GEMMA, LayerForm, Part, decoder_form, epsilon_of, require
from model_worker.kv_cache import AttentionParams, KVCache
from model_worker.model import LoadedModel

# Linear layers that may be joined.
_TYPES = (nn.Linear, Fp8Linear, BlockFp8Linear, GroupedLinear)
# Rows of the trials that tell which of a few formulas a module computes.
_TRIAL_ROWS = 4
Angles = tuple[Tensor, Tensor]  # cosines and sines [T, turning elements of a head]


@dataclass(frozen=True, eq=False)
class _Layer:
    """What a layer computes with. Norms are modules: their weights may be taken away."""

    form: LayerForm
    index: int  # in the KV cache
    of_heads: JoinedLinear
    behind_attention: JoinedLinear
    gate_and_up: JoinedLinear
    down: JoinedLinear


class FusedLayers:
    """A decoder's layers between its embedding and its head, which are called as they are."""

    def __init__(self, loaded: LoadedModel) -> None:
        """UnsupportedPattern with the reason for a model of another form."""
        form = decoder_form(loaded.model, loaded.attention, GEMMA)
        norms = [*(norm for layer in form.layers for norm in layer.norms), form.final_norm]
        self._epsilon = epsilon_of(norms, GEMMA)
        widths = {tuple(norm.weight.shape) for layer in form.layers for norm in layer.of_heads or ()}
        require(widths in (set(), {(form.shape.k_dim,)}), "it normalises queries and keys across heads")
        linears = [part.linear for layer in form.layers for part in layer.parts]
        plain = all(linear.weight.dtype == loaded.dtype for linear in linears if type(linear) is nn.Linear)
        known = plain and all(type(linear) in _TYPES for linear in linears)
        require(known, "its linear layers are neither plain ones of one type nor in FP8, four bits or eight")
        self._form = form
        self._norm = _norm_form(norms, self._epsilon)
        self._activation = _activation([layer.activation for layer in form.layers])
        self._layers = [_layer(layer, index) for layer, index in zip(form.layers, form.order, strict=True)]

    def logits(
        self,
        batch: ForwardBatch,
        cache: KVCache,
        attend: AttentionBackend,
        params: Sequence[AttentionParams],
        change: Change | None = None,
    ) -> Tensor:
        """Write the batch's tokens into the cache and return logits [L, vocab] at `batch.logit_positions`.

        `change` changes what linear modules, whose outputs lie side by side, have made of their input.
        """
        wanted = self._states(batch, cache, attend, params, change)[batch.logit_positions]
        logits: Tensor = self._form.head(wanted)
        cap = self._form.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _states(
        self,
        batch: ForwardBatch,
        cache: KVCache,
        attend: AttentionBackend,
        params: Sequence[AttentionParams],
        change: Change | None,
    ) -> Tensor:
        """Return what the last norm gives, [T, hidden]."""
        from model_worker.cuda import gate_kernel, norm_kernel, rotary_kernel

        form, epsilon, norm = self._form, self._epsilon, self._norm
        residual: Tensor = form.embedding(batch.tokens)
        angles = self._angles(residual, batch)
        normed = norm_kernel.rms_norm(residual, form.layers[0].before[0].weight, epsilon, norm)
        followers = [*(layer.before[0] for layer in form.layers[1:]), form.final_norm]
        for layer, follower in zip(self._layers, followers, strict=True):
            heads, behind = layer.form.of_heads, layer.form.behind or (None, None)
            k_cache, v_cache = cache.k[layer.index], cache.v[layer.index]
            q = rotary_kernel.rotate_and_write(
                layer.of_heads(normed, change),
                k_cache,
                v_cache,
                angles[layer.form.kind],
                batch.slots,
                form.q_heads,
                None if heads is None else (heads[0].weight, heads[1].weight),
                epsilon,
                norm,
            )
            attended = attend(q, k_cache, v_cache, batch, params[layer.index]).flatten(1)
            inner = None if behind[0] is None else behind[0].weight
            weight = layer.form.before[1].weight
            normed = norm_kernel.add_norm(
                residual, layer.behind_attention(attended, change), inner, weight, epsilon, norm
            )
            gate, up = layer.gate_and_up(normed, change).chunk(2, 1)
            given = layer.down(gate_kernel.gated(gate, up, self._activation), change)
            inner = None if behind[1] is None else behind[1].weight
            normed = norm_kernel.add_norm(residual, given, inner, follower.weight, epsilon, norm)
        return normed

    def _angles(self, like: Tensor, batch: ForwardBatch) -> dict[str | None, Angles]:
        """Return the angles of the batch's positions, by the kind of layer."""
        positions = batch.positions.unsqueeze(-2)
        found = {}
        for kind in {layer.form.kind: None for layer in self._layers}:
            cos, sin = self._form.rotary(like, positions, *(() if kind is None else (kind,)))
            found[kind] = (cos[0], sin[0])
        return found


def _layer(form: LayerForm, index: int) -> _Layer:
    q, k, v, output, gate, up, down = form.parts
    return _Layer(form, index, _joined([q, k, v]), _joined([output]), _joined([gate, up]), _joined([down]))


def _joined(parts: list[Part]) -> JoinedLinear:
    linears = list({id(part.linear): part.linear for part in parts}.values())
    biased = {linear.bias is not None for linear in linears}
    require(len(biased) == 1, "some of its linear layers of the same input have biases, and others none")
    return JoinedLinear(linears)


def _norm_form(norms: Sequence[Any], epsilon: float) -> int:
    """Find how the norms multiply by their weights: by the formula whose largest error is the least."""
    from model_worker.cuda import norm_kernel

    largest = [0.0] * len(norm_kernel.FORMS)
    for norm in norms:
        weight = norm.weight.detach()
        x = _trial(weight.shape[0], weight)
        with torch.no_grad():
            want = norm(x).float()
        for form in norm_kernel.FORMS:
            got = norm_kernel.rms_norm(x, weight, epsilon, form).float()
            largest[form] = max(largest[form], float((got - want).abs().max()))
    return largest.index(min(largest))


def _activation(modules: Sequence[nn.Module]) -> int:
    """Find what the gates of the layers compute."""
    from model_worker.cuda import gate_kernel

    require(len({type(module) for module in modules}) == 1, "its layers have different activations")
    x = torch.linspace(-6, 6, 1 << 8)
    want = modules[0](x)
    of_torch = (nn.functional.silu(x), nn.functional.gelu(x, approximate="tanh"))
    fits = [torch.allclose(want, one, rtol=1e-5, atol=1e-6) for one in of_torch]
    require(any(fits), "its activation is neither SiLU nor GELU by tanh")
    return gate_kernel.ACTIVATIONS[fits.index(True)]


def _trial(width: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_TRIAL_ROWS, width, generator=generator).to(like.device, like.dtype)
