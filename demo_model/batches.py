"""Training batches: documents as token ids, grouped by length, with the tokens that count towards the loss.

Knows that only the model's own turns are learned. Does not know the optimizer. Documents are never joined in one row,
so no attention crosses from one into another, and grouping by length keeps the padding small.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from demo_model.corpus import Conversation, Corpus, RawText

LONGEST = 1024
IGNORED = -100
_CHUNK = 512
_MARKS = ("<|endoftext|>", "<|im_end|>", "<think>")
# Documents of this many steps are sorted by length together. More would leave less padding, but more alike documents
# in one step.
_STEPS_GROUPED = 6

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Right-padded rows; `targets` is `ids` shifted by one, or IGNORED where nothing is learned."""

    ids: Ids
    targets: Ids

    @property
    def learned(self) -> int:
        return int((self.targets != IGNORED).sum())


@dataclass(frozen=True)
class Document:
    ids: Ids
    learn: NDArray[np.bool_]


class Batches:
    """Turns an endless corpus into steps; a step is a few batches of different lengths."""

    def __init__(self, corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._corpus = corpus
        self._shuffle = random.Random(corpus.seed)
        self._pad, self._end, self._think = (tokenizer.get_vocab()[mark] for mark in _MARKS)
        self._opening = np.array(tokenizer("<|im_start|>assistant\n")["input_ids"])

    def steps(self, tokens: int, batch_tokens: int) -> Iterator[list[Batch]]:
        """Steps of about `tokens` tokens, as batches of at most `batch_tokens` padded tokens."""
        waiting: list[Document] = []
        size = 0
        for document in self._documents():
            waiting.append(document)
            size += len(document.ids)
            if size >= _STEPS_GROUPED * tokens:
                batches = self._grouped(waiting, batch_tokens)
                self._shuffle.shuffle(batches)
                for step in range(_STEPS_GROUPED):
                    yield batches[step::_STEPS_GROUPED]
                waiting, size = [], 0

    def _documents(self) -> Iterator[Document]:
        documents = self._corpus.documents()
        while True:
            chunk = list(islice(documents, _CHUNK))
            texts = [self._rendered(document) for document in chunk]
            encoded = self._tokenizer(texts, truncation=True, max_length=LONGEST, return_offsets_mapping=True)
            for document, ids, places in zip(chunk, encoded["input_ids"], encoded["offset_mapping"], strict=True):
                yield self._document(document, np.array(ids, dtype=np.int64), np.array(places))

    def _rendered(self, document: Conversation | RawText) -> str:
        if isinstance(document, RawText):
            return document.text + "<|endoftext|>"
        return str(
            self._tokenizer.apply_chat_template(
                document.messages, tools=list(document.tools) or None, enable_thinking=document.thinking, tokenize=False
            )
        )

    def _document(self, document: Conversation | RawText, ids: Ids, places: Ids) -> Document:
        if isinstance(document, RawText):
            learn = np.ones(len(ids), dtype=bool)
            for start, stop in document.given:
                learn[(places[:, 0] >= start) & (places[:, 0] < stop)] = False
            return Document(ids, learn)
        learn = np.zeros(len(ids), dtype=bool)
        for start, stop in self._turns(ids):
            # With thinking on, the template drops the thoughts of earlier turns: those would teach not to think.
            if not document.thinking or ids[start] == self._think:
                learn[start:stop] = True
        return Document(ids, learn)

    def _turns(self, ids: Ids) -> Iterator[tuple[int, int]]:
        """Start and stop of each assistant turn, its end mark included."""
        width = len(self._opening)
        for place in np.flatnonzero(ids[: -width or None] == self._opening[0]):
            if np.array_equal(ids[place : place + width], self._opening):
                ends = np.flatnonzero(ids[place + width :] == self._end)
                yield int(place + width), int(place + width + ends[0] + 1) if len(ends) else len(ids)

    def _grouped(self, documents: list[Document], batch_tokens: int) -> list[Batch]:
        documents.sort(key=lambda document: len(document.ids))
        groups: list[list[Document]] = [[]]
        for document in documents:
            if (len(groups[-1]) + 1) * len(document.ids) > batch_tokens and groups[-1]:
                groups.append([])
            groups[-1].append(document)
        return [self._padded(group) for group in groups]

    def _padded(self, documents: list[Document]) -> Batch:
        width = max(len(document.ids) for document in documents)
        ids = np.full((len(documents), width), self._pad, dtype=np.int64)
        targets = np.full((len(documents), width), IGNORED, dtype=np.int64)
        for row, document in enumerate(documents):
            length = len(document.ids)
            ids[row, :length] = document.ids
            targets[row, : length - 1] = np.where(document.learn[1:], document.ids[1:], IGNORED)
        return Batch(ids, targets)
