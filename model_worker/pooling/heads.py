"""Heads: from the last hidden states of texts to the values of a task.

A head of transformers' own (a classifier, a language model's logits) runs as the checkpoint's class has it: its model
is replaced by a stand-in that returns the hidden states which the backbone has computed. Knows no architecture, except
how poolers are called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from interfaces import PoolingContext, PoolingTask
from model_worker.pooling.modules import VectorModules
from model_worker.pooling.texts import Texts

# Tokens whose logits over the vocabulary exist at once: 512 of 30,000 words take 60 MB.
_LOGITS_AT_ONCE = 512


class Values(NamedTuple):
    """Values [rows, width], and the rows of each text."""

    values: Tensor
    rows: Sequence[int]


class Head(Protocol):
    """Makes the values of some tasks. `width` is that of vectors, 0 for a head without them."""

    @property
    def tasks(self) -> frozenset[PoolingTask]: ...

    @property
    def width(self) -> int: ...

    def __call__(self, hidden: Tensor, texts: Texts, options: PoolingContext) -> Values: ...


@dataclass
class VectorHead:
    """Vectors of texts, and of their tokens. `routes` are the modules of texts of certain kinds."""

    modules: VectorModules
    tasks: frozenset[PoolingTask]
    routes: Mapping[str, VectorModules] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return self.modules.width

    def __call__(self, hidden: Tensor, texts: Texts, options: PoolingContext) -> Values:
        modules = self.routes.get(options.route, self.modules)
        if options.task is PoolingTask.EMBED_TOKENS:
            values, rows = kept_tokens(modules.tokens(hidden), texts)
        else:
            values = modules.texts(hidden, texts)
            rows = [1] * len(texts.lengths)
        if options.dimensions is not None:
            values = values[:, : options.dimensions]
        return Values(normalize(values, dim=-1) if options.normalize else values, rows)


def kept_tokens(values: Tensor, texts: Texts) -> Values:
    """Return the rows of tokens whose vectors are kept, and their number in each text."""
    if texts.kept is None:
        return Values(values, texts.lengths)
    rows = [int(part.sum()) for part in texts.kept.split(texts.lengths)]
    return Values(values[texts.kept], rows)


# The hidden states that a stand-in returns.
_given: ContextVar[Tensor] = ContextVar("given_states")


class GivenStates(nn.Module):
    """Stands in for a model whose hidden states are known already."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._pooler: Any = getattr(model, "pooler", None)
        self._activation: Any = getattr(model, "pooler_activation", None)

    def forward(self, *_: Any, **__: Any) -> _States:
        states = _given.get()
        return _States(last_hidden_state=states, pooler_output=self._pooled(states))

    def _pooled(self, states: Tensor) -> Tensor | None:
        if self._pooler is None:
            return None
        # ALBERT's pooler is a linear layer alone.
        alone = self._activation is not None
        pooled: Tensor = self._activation(self._pooler(states[:, 0])) if alone else self._pooler(states)
        return pooled


class _States(BaseModelOutputWithPooling):
    """Hidden states as a model returns them. What else a model might return is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class ModelHead:
    """A model of transformers without its backbone."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        setattr(model, model.base_model_prefix, GivenStates(model.base_model))

    def logits(self, states: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the head's logits for states [texts, tokens, width] of `tokens` [texts, tokens]."""
        given = _given.set(states)
        try:
            output = self._model(input_ids=tokens, attention_mask=mask.long())
        finally:
            _given.reset(given)
        logits: Tensor = output.logits
        return logits


@dataclass
class LabelHead:
    """A number for each label of a text. With `last` the head reads a decoder's last token, else a text's tokens."""

    head: ModelHead
    last: bool
    multi_label: bool
    tasks: frozenset[PoolingTask] = frozenset({PoolingTask.CLASSIFY})
    width: int = 0

    def __call__(self, hidden: Tensor, texts: Texts, options: PoolingContext) -> Values:
        if self.last:
            ends = texts.bounds[1:].long() - 1
            tokens = texts.tokens[ends][:, None]
            logits = self.head.logits(hidden[ends][:, None], tokens, torch.ones_like(tokens))
        else:
            # Texts of like length together: padding all to the longest could take gigabytes.
            groups = list(texts.groups())
            states = hidden.split([len(group.tokens) for group in groups])
            logits = torch.cat(
                [
                    self.head.logits(group.pad(part), group.pad(group.tokens), group.mask)
                    for group, part in zip(groups, states, strict=True)
                ]
            )
        return Values(_activated(logits, options.activate, self.multi_label), [1] * len(texts.lengths))


@dataclass
class VectorLabelHead:
    """A number for each label, from a pooled vector."""

    modules: VectorModules
    multi_label: bool
    tasks: frozenset[PoolingTask] = frozenset({PoolingTask.CLASSIFY})
    width: int = 0

    def __call__(self, hidden: Tensor, texts: Texts, options: PoolingContext) -> Values:
        logits = self.modules.texts(hidden, texts)
        return Values(_activated(logits, options.activate, self.multi_label), [1] * len(texts.lengths))


@dataclass
class TokenLabelHead:
    """A number for each label of a token."""

    head: ModelHead
    tasks: frozenset[PoolingTask] = frozenset({PoolingTask.CLASSIFY_TOKENS})
    width: int = 0

    def __call__(self, hidden: Tensor, texts: Texts, options: PoolingContext) -> Values:
        logits = self.head.logits(hidden[None], texts.tokens[None], torch.ones_like(texts.tokens)[None])[0].float()
        return Values(torch.softmax(logits, dim=-1) if options.activate else logits, texts.lengths)


@dataclass
class ScoreHead:
    """A decoder's score of a pair: the logit of yes, less that of no if there is one, at the last token."""

    head: ModelHead
    yes: int
    no: int | None
    tasks: frozenset[PoolingTask] = frozenset({PoolingTask.CLASSIFY})
    width: int = 0

    def __call__(self, hidden: Tensor, texts: Texts, options: PoolingContext) -> Values:
        ends = texts.bounds[1:].long() - 1
        tokens = texts.tokens[ends][None]
        logits = self.head.logits(hidden[ends][None], tokens, torch.ones_like(tokens))[0].float()
        scores = logits[:, self.yes] if self.no is None else logits[:, self.yes] - logits[:, self.no]
        return Values(_activated(scores[:, None], options.activate, False), [1] * len(texts.lengths))


@dataclass
class SparseHead:
    """The weights of words: log(1 + relu(logits of a masked language model)), the largest or the sum over a text."""

    head: ModelHead
    maximum: bool
    twice: bool
    tasks: frozenset[PoolingTask] = frozenset({PoolingTask.SPARSE})
    width: int = 0

    def __call__(self, hidden: Tensor, texts: Texts, options: PoolingContext) -> Values:
        pieces: list[Tensor] = []
        rows: list[int] = []
        for i in range(len(texts.lengths)):
            start, end = texts.starts[i], texts.starts[i + 1]
            weights = self._weights(hidden[start:end], texts.tokens[start:end])
            words = weights.nonzero()[:, 0]
            pieces.append(torch.stack([words.float(), weights[words]], dim=1))
            rows.append(len(words))
        return Values(torch.cat(pieces), rows)

    def _weights(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the weight of each word of the vocabulary in one text."""
        found: Tensor | None = None
        for part, ids in zip(hidden.split(_LOGITS_AT_ONCE), tokens.split(_LOGITS_AT_ONCE), strict=True):
            weights = self.head.logits(part[None], ids[None], torch.ones_like(ids)[None])[0].float().relu().log1p()
            if self.twice:
                weights = weights.log1p()
            merged = weights.amax(0) if self.maximum else weights.sum(0)
            if found is not None:
                merged = torch.maximum(found, merged) if self.maximum else found + merged
            found = merged
        assert found is not None
        return found


def _activated(logits: Tensor, activate: bool, multi_label: bool) -> Tensor:
    logits = logits.float()
    if not activate:
        return logits
    return torch.sigmoid(logits) if multi_label or logits.shape[1] == 1 else torch.softmax(logits, dim=1)
