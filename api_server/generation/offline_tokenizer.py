"""The tokenizer as a `PipelineTokenizer`: turns requests into contexts, by the rules of the server.

For use within one process, beside a pipeline; the server itself sends prompts to its scheduler. Knows no dialect, and
nothing of what runs the contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from api_server.constraints.local import LocalCompiler
from api_server.errors import RequestFailed
from api_server.generation.preparation import constrained, prepare_one
from api_server.text.stops import Stops
from api_server.text.tokenizer import Tokenizer
from interfaces import GenerationStatus, TextContext, TextGenerationRequest, TokenSlice

# Tokens of the prompt that the first token of an answer is read after: it may begin a word or continue one.
_TOKENS_BEFORE = 16


class TextTokenizer:
    """A `PipelineTokenizer`. `max_length` bounds prompt and answer together, in tokens: what the pipeline can hold."""

    expects_content_wrapping = False

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._compiler = LocalCompiler(tokenizer)

    @classmethod
    def load(cls, model: str, max_length: int) -> TextTokenizer:
        """Loads from a Hugging Face directory or hub name. Raises OSError or ValueError with the reason."""
        return cls(Tokenizer.load(model), max_length)

    @property
    def eos(self) -> int:
        """The token that ends a sequence. ValueError for a model that has none."""
        if not self._tokenizer.eos_token_ids:
            raise ValueError("this model has no end-of-sequence token")
        return self._tokenizer.eos_token_ids[0]

    @property
    def eos_token_ids(self) -> set[int]:
        """All tokens that end a sequence."""
        return set(self._tokenizer.eos_token_ids)

    async def new_context(self, request: TextGenerationRequest) -> TextContext:
        """Makes the context of one answer, so `n` must be 1. ValueError names what is wrong with the request."""
        if request.n != 1:
            raise ValueError(f"n must be 1, got {request.n}: make a request for each answer")
        try:
            prepared = await prepare_one(self._tokenizer, request, self._max_length, None)
            prepared = await constrained(prepared, self._tokenizer, self._compiler.compile)
        except RequestFailed as error:
            raise ValueError(error.message) from None
        context = prepared.context(0)
        context.adapter = request.lora_name or ""
        if context.sampling_params.max_new_tokens == 0:
            context.status = GenerationStatus.MAXIMUM_LENGTH
        return context

    async def encode(self, prompt: str, add_special_tokens: bool) -> TokenSlice:
        """Token ids of a text. ValueError when the text has more tokens than `max_length`."""
        try:
            spans = await self._tokenizer.spans(prompt, add_special_tokens)
        except RequestFailed as error:
            raise ValueError(error.message) from None
        if len(spans) > self._max_length:
            raise ValueError(f"the prompt has {len(spans)} tokens; at most {self._max_length} fit")
        return np.array([span.id for span in spans], np.int64)

    async def decode(self, encoded: NDArray[np.integer[Any]] | list[int], **kwargs: Any) -> str:
        """Text of token ids. `skip_special_tokens` is True unless given. ValueError for ids outside the vocabulary."""
        try:
            return await self._tokenizer.decode(np.asarray(encoded).tolist(), kwargs.get("skip_special_tokens", True))
        except RequestFailed as error:
            raise ValueError(error.message) from None

    def reader(self, context: TextContext) -> TextReader:
        """A reader that makes the text of a context's tokens and finds its stop strings."""
        return TextReader(self._tokenizer, context)

    def close(self) -> None:
        """Ends the threads."""
        self._tokenizer.close()


class TextReader:
    """The text of one answer so far, without its end token or stop string, and the tokens that it was made of."""

    def __init__(self, tokenizer: Tokenizer, context: TextContext) -> None:
        params = context.sampling_params
        before: list[int] = context.tokens.prompt[-_TOKENS_BEFORE:].tolist()
        self._detokenizer = tokenizer.detokenizer(before, True)
        self._stops = Stops(params.stop or [], (), keep=False)
        self._least = params.min_new_tokens
        self._pieces: list[str] = []
        self.token_ids: list[int] = []
        self.is_done = context.is_done

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def stopped(self) -> bool:
        """True when a stop string has ended the text."""
        return self._stops.matched is not None

    def add(self, tokens: Sequence[int], status: GenerationStatus) -> None:
        """Takes the next tokens; `status` is the context's after the last of them."""
        for i, token in enumerate(tokens):
            self.token_ids.append(token)
            ends = status is GenerationStatus.END_OF_SEQUENCE and i == len(tokens) - 1
            self._stops.active = len(self.token_ids) > self._least
            self._pieces.append("" if ends else self._stops.add(self._detokenizer.add(token)))
            if self.stopped:
                self.is_done = True
                return
        if status.is_done:
            self._pieces += [self._stops.add(self._detokenizer.flush()), self._stops.flush()]
            self.is_done = True
