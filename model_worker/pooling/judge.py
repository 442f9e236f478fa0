"""Judges at load whether int8 weights and activations leave what a head makes of texts nearly as it was.

What counts is what a client gets: the vector of a text as its pooling makes it, the weights of its words or the
probabilities of its labels. Knows no backbone.
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
# The same of the vectors of tokens, or of words' weights, on average.
LEAST_MEAN_COSINE = 0.99
# Change of a probability.
MOST_CHANGE = 0.05


class Judge:
    """What a head makes of texts, given the states of the model as it was."""

    def __init__(self, head: Head, texts: Texts, exact: Tensor, vocab_size: int) -> None:
        self._head = head
        self._vocab_size = vocab_size
        self._texts = texts
        # A model that makes vectors of texts is judged by those, and not by its tokens' as well.
        tasks = head.tasks - {PoolingTask.EMBED_TOKENS} or head.tasks
        self._contexts = [self._context(task) for task in sorted(tasks)]
        self._wanted = [self._values(context, exact) for context in self._contexts]

    @property
    def texts(self) -> Texts:
        """The texts whose states are judged."""
        return self._texts

    def __call__(self, states: Tensor) -> str | None:
        """Explain how values of these hidden states differ too much from those of the model as it was, or None."""
        for context, want in zip(self._contexts, self._wanted, strict=True):
            got = self._values(context, states)
            if context.task in (PoolingTask.CLASSIFY, PoolingTask.CLASSIFY_TOKENS):
                change = float((got - want).abs().max())
                if not change <= MOST_CHANGE:
                    return f"changes its probabilities too much (by {change:.3f})"
                continue
            cosines = cosine_similarity(got, want, dim=1)
            of_texts = context.task is PoolingTask.EMBED
            if not float(cosines.mean()) >= (LEAST_COSINE if of_texts else LEAST_MEAN_COSINE):
                return f"changes its vectors too much (cosine {float(cosines.mean()):.4f} on average)"
            if of_texts and not float(cosines.min()) >= LEAST_OF_ONE:
                return f"changes its vectors too much (cosine {float(cosines.min()):.4f} of one text)"
        return None

    def _context(self, task: PoolingTask) -> PoolingContext:
        texts = self._texts
        return PoolingContext.of([part.tolist() for part in texts.tokens.split(texts.lengths)], task)

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
