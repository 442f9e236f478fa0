"""Vectors, scores and labels of texts within this process: the API server's tokenizing joined to the worker's models.

Knows one checkpoint and one task. Knows neither requests nor a server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from api_server.errors import RequestFailed
from api_server.text.pooled_model import IN_WORDS, PooledModel
from api_server.text.text_batches import BatchTokenizer, Bounds, TextBatch
from api_server.text.tokenizer import Tokenizer
from interfaces import PoolingContext, PoolingTask
from model_worker.pooling.load import load_pooling
from shared.pooling_files import PoolingFiles, task_of

# Options of LLM that the models of one-shot tasks have, too, by their names in `load_pooling`.
_OPTIONS = {
    "device": "device",
    "dtype": "dtype",
    "quantization": "quantization",
    "max_batch_tokens": "max_batch_tokens",
    "max_length": "max_model_len",
}


class TextPooler:
    """A checkpoint for one task. Do not use it from two threads at once."""

    def __init__(self, model: str, task: str, options: Mapping[str, Any]) -> None:
        """Load the model. ValueError gives the reason when it cannot be."""
        files = PoolingFiles.read(model)
        self._model = PooledModel(task_of(model, task), files)
        chosen = {name: options[given] for given, name in _OPTIONS.items() if given in options}
        self._pooler = load_pooling(model, task=task, **chosen)
        self._tokenizer = Tokenizer.load(files.tokenizer_source)
        self._batches = BatchTokenizer(self._tokenizer.backend, self._tokenizer.has_token_types)

    def embed(
        self, texts: Sequence[str], prompt_name: str | None, dimensions: int | None, normalize: bool, truncate: bool
    ) -> NDArray[np.float32]:
        """Return the vector of each text. ValueError names the text that is too long."""
        try:
            prompt = self._model.prompt(prompt_name, "prompt_name")
            prompted = [self._model.prompted(text, prompt) for text in texts]
            batch = self._batches.texts(prompted, self._bounds("texts", truncate))
        except RequestFailed as error:
            raise ValueError(error.message) from None
        route = self._model.files.route(prompt_name)
        return self._run(batch, PoolingTask.EMBED, dimensions=dimensions, normalize=normalize, route=route)

    def scores(self, query: str, documents: Sequence[str], instruction: str | None) -> NDArray[np.float32]:
        """Return the score of each document, from 0 to 1. A document that is too long is cut."""
        if self._model.task != "rerank":
            raise ValueError(f"rerank: this model {IN_WORDS[self._model.task]}; load a reranker")
        template = self._model.files.pair_template
        if instruction is not None and template is None:
            raise ValueError("instruction: this reranker takes none; leave it out")
        bounds = self._bounds("documents", truncate=True)
        try:
            if template is None:
                firsts = [self._model.prompted(query, "")] * len(documents)
                seconds = [self._model.prompted(document, "") for document in documents]
                batch = self._batches.pairs(firsts, seconds, bounds)
            else:
                bodies = [
                    self._tokenizer.guarded(template.body, query, document, instruction) for document in documents
                ]
                heads = [template.body(query, "", instruction)] * len(documents)
                batch = self._batches.framed(bodies, template.prefix, template.suffix, bounds, heads)
        except RequestFailed as error:
            raise ValueError(error.message) from None
        return self._run(batch, PoolingTask.CLASSIFY)[:, 0]

    def labels(self, texts: Sequence[str], truncate: bool) -> list[dict[str, float]]:
        """Return the probability of each label, for each text."""
        try:
            prompted = [self._model.prompted(text, "") for text in texts]
            batch = self._batches.texts(prompted, self._bounds("texts", truncate))
        except RequestFailed as error:
            raise ValueError(error.message) from None
        values = self._run(batch, PoolingTask.CLASSIFY)
        return [dict(zip(self._pooler.labels, row.tolist(), strict=True)) for row in values]

    def close(self) -> None:
        """End the tokenizer's threads."""
        self._tokenizer.close()

    def _bounds(self, field: str, truncate: bool) -> Bounds:
        return Bounds(limit=self._pooler.max_model_len, truncate=truncate, field=field, remedy="truncate=True")

    def _run(self, batch: TextBatch, task: PoolingTask, **options: Any) -> NDArray[np.float32]:
        context = PoolingContext(
            tokens=batch.tokens, lengths=batch.lengths, token_types=batch.token_types, task=task, **options
        )
        return self._pooler.run(context)[0]
