"""What the workers have reported about the model: kept while a worker restarts, so that requests can be checked."""

from __future__ import annotations

import json
from typing import Any

from interfaces import NO_IMAGES, CodecFacts, Status


class ModelFacts:
    """Facts of the last Status that had any. Zero and empty until then."""

    def __init__(self) -> None:
        # Longest prompt and answer, or longest text, in tokens.
        self.max_model_len = 0
        self.vocab_size = 0
        # GENERATE, and values of `PoolingTask`.
        self.tasks: frozenset[str] = frozenset()
        # Width of the vector of a text; 0 where the model makes none.
        self.vector_width = 0
        # Names of a classifier's labels, in the order of their numbers.
        self.labels: list[str] = []
        # Of the codec of a model that generates speech tokens.
        self.codec: CodecFacts | None = None
        # What the workers do with images: a value of `WorkerHello.images`, the least of all.
        self.images = NO_IMAGES
        # The schemas of the parameters of each logits processor that clients may name; None: no worker has reported.
        self.processors: dict[str, Any] | None = None
        self._schema_texts: dict[str, str] = {}

    def update(self, status: Status) -> None:
        self.max_model_len = status.max_model_len or self.max_model_len
        self.vocab_size = status.vocab_size or self.vocab_size
        if status.tasks:
            self.tasks = frozenset(status.tasks)
            self.vector_width = status.vector_width
            self.labels = status.labels
            self.images = status.images
            self.codec = status.codec
            self._update_processors(status.processors)

    def _update_processors(self, texts: dict[str, str]) -> None:
        if self.processors is None or texts != self._schema_texts:
            self._schema_texts = texts
            self.processors = {name: json.loads(text) for name, text in texts.items()}
