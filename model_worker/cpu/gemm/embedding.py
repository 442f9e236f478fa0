"""Embeddings whose table is no plain tensor: it is in its file's encoding, or lies in panels of codes.

Rows are decoded as they are looked up. A table that is a linear layer's weight, too, as that of tied embeddings, is in
memory once. Knows how transformers' embeddings scale what they find. Knows no format.
"""

from __future__ import annotations

import copy
import logging
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model_worker.cpu.gemm.coded_linear import CodedLinear, UnsupportedCodes
from model_worker.cpu.gemm.encoded_linear import EncodedLinear, EncodedWeight
from model_worker.cpu.gemm.weight_format import PANEL

log = logging.getLogger(__name__)

# What transformers calls embeddings that multiply what they find by `embed_scale`.
_SCALED = "ScaledWordEmbedding"


def has_table(module: nn.Module) -> bool:
    """Whether a module does nothing but look rows up in its weight, and perhaps scale them."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None or len(module._parameters) != 1:
        # One with parameters of its own has rows that are not in the table.
        return False
    return type(module) is nn.Embedding or type(module).__name__.endswith(_SCALED)


class TableEmbedding(nn.Embedding):
    """Stands for another embedding, whose table it finds elsewhere, and gives what that would, in `dtype`."""

    def __init__(self, other: nn.Embedding, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.num_embeddings = other.num_embeddings
        self.embedding_dim = other.embedding_dim
        self.padding_idx = other.padding_idx
        self.max_norm = None
        self.norm_type = other.norm_type
        self.scale_grad_by_freq = False
        self.sparse = False
        self.dtype = dtype
        # What computes with rows as `other` does. Not a child: it has no weight.
        self._like: list[nn.Embedding] = other._like if isinstance(other, TableEmbedding) else [_without_table(other)]
        self.is_scaled = type(self._like[0]) is not nn.Embedding
        if self.is_scaled:
            self.embed_scale: Any = other.embed_scale

    @abstractmethod
    def rows(self, numbers: Tensor) -> Tensor:
        """Return some rows of the table, float32 [.., width]."""

    def forward(self, input: Tensor) -> Tensor:
        found = self.rows(input).to(self.dtype)
        if not self.is_scaled:
            return found
        # Passes may run beside each other, so each has a copy of its own.
        like = copy.copy(self._like[0])
        like._parameters = {"weight": nn.Parameter(found.reshape(-1, self.embedding_dim), requires_grad=False)}
        scaled: Tensor = like(torch.arange(input.numel()).reshape(input.shape))
        return scaled


def _without_table(module: nn.Embedding) -> nn.Embedding:
    """Return a copy of an embedding, which computes as that does with any rows that it is given as its weight."""
    like = copy.copy(module)
    like._parameters = {}
    like.padding_idx = None
    return like


class EncodedEmbedding(TableEmbedding):
    """An embedding whose table is in its file's encoding."""

    def __init__(self, source: EncodedWeight, other: nn.Embedding, dtype: torch.dtype) -> None:
        super().__init__(other, dtype)
        self.source = source
        # Not a child: it has no weight yet.
        self._other = [other]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Return a new copy of the decoded table."""
        return self.source.decoded(self.dtype)

    def rows(self, numbers: Tensor) -> Tensor:
        flat = numbers.reshape(-1)
        found = torch.empty(len(flat), self.embedding_dim)
        pieces = flat // PANEL
        for piece in pieces.unique().tolist():
            first = piece * PANEL
            chosen = pieces == piece
            found[chosen] = self.source.rows(first, min(first + PANEL, self.num_embeddings))[flat[chosen] - first]
        return found.reshape(*numbers.shape, self.embedding_dim)

    def plain(self, weight: nn.Parameter) -> nn.Embedding:
        """Return the embedding that this one stands for, with its decoded table."""
        other = self._other[0]
        other.weight = weight
        return other


class CodedEmbedding(TableEmbedding):
    """An embedding whose table is the weight of a layer in codes."""

    def __init__(self, linear: CodedLinear, other: nn.Embedding) -> None:
        super().__init__(other, linear.dtype)
        # Not a child: a head is one of whatever module it is the head of.
        self._linear = [linear]

    @property
    def linear(self) -> CodedLinear:
        return self._linear[0]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Return a new copy of the dequantised table, float32."""
        return self.rows(torch.arange(self.num_embeddings))

    def rows(self, numbers: Tensor) -> Tensor:
        return self.linear.rows(numbers)


class Place(NamedTuple):
    """Where a module is."""

    parent: nn.Module
    name: str

    @property
    def module(self) -> Any:
        return getattr(self.parent, self.name)


class Table(NamedTuple):
    """An embedding with an encoded table, or with one that is a linear layer's weight, too."""

    place: Place
    head: Place | None


def tables_of(model: nn.Module) -> list[Table]:
    """Find the embeddings whose table need not stay as it is when linear layers are packed."""
    heads = {id(_weight_of(place.module)): place for place in _places(model, nn.Linear, EncodedLinear)}
    found = []
    for place in _places(model, nn.Embedding):
        embedding = place.module
        if isinstance(embedding, EncodedEmbedding) or has_table(embedding):
            head = heads.get(id(_weight_of(embedding)))
            if head is not None or isinstance(embedding, EncodedEmbedding):
                found.append(Table(place, head))
    return found


def _places(model: nn.Module, *kinds: type[nn.Module]) -> Iterator[Place]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, kinds):
                yield Place(parent, name)


def _weight_of(module: nn.Module) -> Any:
    """Return what modules with the same weight have in common."""
    return module.source if isinstance(module, EncodedLinear | EncodedEmbedding) else module.weight


def pack_tables(tables: list[Table], in_codes: bool) -> list[CodedLinear]:
    """Let embeddings look rows up in panels of codes: their head's, which is packed now, or panels of their own.

    Tables that panels cannot hold are decoded, and all encoded ones unless they are to be `in_codes`. Returns the
    layers that have the panels.
    """
    packed = []
    for place, head in tables:
        embedding = place.module
        linear = None if head is None else head.module
        if not (isinstance(linear, CodedLinear) and linear.order is None):
            if not isinstance(embedding, EncodedEmbedding):
                continue
            linear = _panels_of(embedding) if in_codes else None
        if isinstance(embedding, EncodedEmbedding):
            embedding.source.let_go()
        if linear is None:
            plain = embedding.plain(nn.Parameter(embedding.weight, requires_grad=False))
            setattr(place.parent, place.name, plain)
        else:
            packed.append(linear)
            setattr(place.parent, place.name, CodedEmbedding(linear, embedding))
    return packed


def _panels_of(embedding: EncodedEmbedding) -> CodedLinear | None:
    """Return a layer whose weight is the table, in codes, if its first rows are those of the decoded one."""
    read = embedding.source.codes
    if read is None or embedding.dtype != torch.bfloat16:
        return None
    try:
        coded = CodedLinear((embedding.num_embeddings, embedding.embedding_dim), None, embedding.dtype, read)
    except UnsupportedCodes as reason:
        log.info("a table of %d tokens is decoded, since %s", embedding.num_embeddings, reason)
        return None
    first = torch.arange(min(PANEL, embedding.num_embeddings))
    same = torch.allclose(coded.rows(first), embedding.source.rows(0, len(first)), rtol=1e-5, atol=1e-7)
    return coded if same and coded.order is None else None


def keep_encoded(model: nn.Module, name: str, weight: EncodedWeight, dtype: torch.dtype) -> None:
    """Put a layer with an encoded weight in the place of a linear layer, or of an embedding, of this name."""
    module = model.get_submodule(name)
    if isinstance(module, nn.Embedding):
        model.set_submodule(name, EncodedEmbedding(weight, module, dtype))
    else:
        bias: Any = module.bias
        model.set_submodule(name, EncodedLinear(weight, bias, dtype))


def decode_all(model: nn.Module) -> None:
    """Make plain layers of all encoded ones: a model that runs before it is packed needs no decoding then."""
    decoded: dict[EncodedWeight, nn.Parameter] = {}
    for place in list(_places(model, EncodedLinear, EncodedEmbedding)):
        encoded = place.module
        if encoded.source not in decoded:
            decoded[encoded.source] = nn.Parameter(encoded.weight, requires_grad=False)
            encoded.source.let_go()
        setattr(place.parent, place.name, encoded.plain(decoded[encoded.source]))
