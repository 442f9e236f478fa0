"""Judges at load whether int8 weights and activations leave what a head makes of texts nearly as it was.

What counts is what a client gets: the vector of a text as its pooling makes it, the weights of its words, or the
probabilities of its labels and the logits behind them. Knows no backbone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from interfaces import PoolingContext, PoolingTask
from model_worker.pooling.heads import Head
from model_worker.pooling.texts import Texts

# Cosine of a text's vector to that of the model as it was: on average, and of each text, since rounding hits one text
# harder than another.
LEAST_COSINE = 0.999
LEAST_OF_ONE = 0.998
# The same of the vectors of tokens, of words' weights, or of the states behind labels, on average.
LEAST_MEAN_COSINE = 0.99
# Change of a probability.
MOST_CHANGE = 0.05
# Change of a logit, and as a share of the largest if that is more. Probabilities alone do not show damage: a reranker
# gives random texts logits far below 0, where a probability hardly changes with its logit.
MOST_LOGIT_CHANGE = 0.5
MOST_LOGIT_SHARE = 0.05
# Tasks whose values are of labels.
_OF_LABELS = (PoolingTask.CLASSIFY, PoolingTask.CLASSIFY_TOKENS)


class Judge:
    """What a head makes of texts, given the states of the model as it was."""

    def __init__(self, head: Head, texts: Texts, exact: Tensor, vocab_size: int) -> None:
        self._head = head
        self._vocab_size = vocab_size
        self._texts = texts
        # A model that makes vectors of texts is judged by those, and not by its tokens' as well.
        tasks = head.tasks - {PoolingTask.EMBED_TOKENS} or head.tasks
        self._contexts = [self._context(task, True) for task in sorted(tasks)]
        self._contexts += [self._context(task, False) for task in sorted(tasks) if task in _OF_LABELS]
        self._exact = exact.float()
        self._wanted = [self._values(context, exact) for context in self._contexts]

    @property
    def texts(self) -> Texts:
        """The texts whose states are judged."""
        return self._texts

    def __call__(self, states: Tensor) -> str | None:
        """Explain how values of these hidden states differ too much from those of the model as it was, or None."""
        for context, want in zip(self._contexts, self._wanted, strict=True):
            got = self._values(context, states)
            if context.task in _OF_LABELS:
                if (reason := self._labels_differ(got, want, states, context.activate)) is not None:
                    return reason
                continue
            cosines = cosine_similarity(got, want, dim=1)
            of_texts = context.task is PoolingTask.EMBED
            if not float(cosines.mean()) >= (LEAST_COSINE if of_texts else LEAST_MEAN_COSINE):
                return f"changes its vectors too much (cosine {float(cosines.mean()):.4f} on average)"
            if of_texts and not float(cosines.min()) >= LEAST_OF_ONE:
                return f"changes its vectors too much (cosine {float(cosines.min()):.4f} of one text)"
        return None

    def _labels_differ(self, got: Tensor, want: Tensor, states: Tensor, activated: bool) -> str | None:
        """Explain how the probabilities of labels, or else their logits and the states behind them, differ too much."""
        change = float((got - want).abs().max())
        if activated:
            return None if change <= MOST_CHANGE else f"changes its probabilities too much (by {change:.3f})"
        if not change <= max(MOST_LOGIT_CHANGE, MOST_LOGIT_SHARE * float(want.abs().max())):
            return f"changes its logits too much (by {change:.2f})"
        cosine = float(cosine_similarity(states.float(), self._exact, dim=1).mean())
        if not cosine >= LEAST_MEAN_COSINE:
            return f"changes the states behind its labels too much (cosine {cosine:.4f} on average)"
        return None

    def _context(self, task: PoolingTask, activate: bool) -> PoolingContext:
        texts = self._texts
        parts = [part.tolist() for part in texts.tokens.split(texts.lengths)]
        return PoolingContext.of(parts, task, activate=activate)

    def _values(self, context: PoolingContext, states: Tensor) -> Tensor:
        """Return a row for each text or token; of sparse values with a number for each word."""
        found = self._head(states, self._texts, context)
        values = found.values.float()
        if context.task is not PoolingTask.SPARSE:
            return values
        words = values[:, 0].long()
        texts = torch.repeat_interleave(torch.arange(len(found.rows)), torch.tensor(list(found.rows)))
        # Two texts without any word are equal, so each has one more.
        dense = torch.zeros(len(found.rows), self._vocab_size + 1)
        dense[:, -1] = 1e-3
        dense[texts, words] = values[:, 1]
        return dense
