"""The tokenizer as a `PipelineTokenizer`: from requests to contexts, by the rules of the server.

For use within one process, beside a pipeline; the server itself sends prompts to its scheduler. Knows no dialect, and
nothing of what runs the contexts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from api_server.constraints.local import LocalCompiler
from api_server.errors import RequestFailed
from api_server.generation.preparation import constrained, prepare_one
from api_server.text.tokenizer import Tokenizer
from interfaces import GenerationStatus, TextContext, TextGenerationRequest, TokenSlice


class TextTokenizer:
    """`max_length` bounds prompt and answer together, in tokens: what the pipeline can hold."""

    expects_content_wrapping = False

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._compiler = LocalCompiler(tokenizer)

    @classmethod
    def load(cls, model: str, max_length: int) -> TextTokenizer:
        """From a Hugging Face directory or hub name. Raises OSError or ValueError, with the reason, if it cannot."""
        return cls(Tokenizer.load(model), max_length)

    @property
    def eos(self) -> int:
        """ValueError for a model that has no such token."""
        if not self._tokenizer.eos_token_ids:
            raise ValueError("this model has no end-of-sequence token")
        return self._tokenizer.eos_token_ids[0]

    @property
    def eos_token_ids(self) -> set[int]:
        """All tokens that end a sequence."""
        return set(self._tokenizer.eos_token_ids)

    async def new_context(self, request: TextGenerationRequest) -> TextContext:
        """ValueError names what is wrong with the request. A context is one answer, so `n` must be 1."""
        if request.n != 1:
            raise ValueError(f"n must be 1, got {request.n}: make a request for each answer")
        try:
            prepared = await prepare_one(self._tokenizer, request, self._max_length, None)
            prepared = await constrained(prepared, self._tokenizer, self._compiler.compile)
        except RequestFailed as error:
            raise ValueError(error.message) from None
        context = prepared.context(0)
        if context.sampling_params.max_new_tokens == 0:
            context.status = GenerationStatus.MAXIMUM_LENGTH
        return context

    async def encode(self, prompt: str, add_special_tokens: bool) -> TokenSlice:
        """ValueError when the text has more tokens than `max_length`."""
        try:
            spans = await self._tokenizer.spans(prompt, add_special_tokens)
        except RequestFailed as error:
            raise ValueError(error.message) from None
        if len(spans) > self._max_length:
            raise ValueError(f"the prompt has {len(spans)} tokens; at most {self._max_length} fit")
        return np.array([span.id for span in spans], np.int64)

    async def decode(self, encoded: NDArray[np.integer[Any]] | list[int], **kwargs: Any) -> str:
        """`skip_special_tokens` is True unless given. ValueError for ids outside the vocabulary."""
        try:
            return await self._tokenizer.decode(np.asarray(encoded).tolist(), kwargs.get("skip_special_tokens", True))
        except RequestFailed as error:
            raise ValueError(error.message) from None

    def close(self) -> None:
        """Ends the threads."""
        self._tokenizer.close()
