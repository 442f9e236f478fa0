"""`LLM`: text, chats, vectors, scores, labels, speech and images from a model within this process, without a server.

Joins the tokenizer of the API server to the pipelines of the worker, and keeps the batch full. Requests get the tokens
that they get from a server.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from api_server.generation.offline_tokenizer import TextReader, TextTokenizer
from api_server.pixels.wish import Wish
from deploy.offline_images import TextPainter
from deploy.offline_pooling import TextPooler
from deploy.offline_speech import Sound, TextSpeaker
from deploy.offline_speech_tokens import TokenSpeaker
from interfaces import (
    GenerationStatus,
    RequestID,
    SamplingParamsInput,
    TextContext,
    TextGenerationInputs,
    TextGenerationRequest,
    TextGenerationRequestMessage,
)
from model_worker.pipelines.text import TextPipeline
from shared.pooling_files import task_of
from shared.speech_tokens import SpeechTokenFiles

T = TypeVar("T")

# Tokens that a row gets between two looks at its text: a stop string wastes what comes after it.
_STEPS_AT_A_TIME = 8

Chat = Sequence[TextGenerationRequestMessage | dict[str, Any]]
Sampling = SamplingParamsInput | Sequence[SamplingParamsInput] | None
Adapters = str | Sequence[str | None] | None


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt: its text without the stop string, and its tokens with the token that ended it."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class Ranked:
    """The place of a document among those given, and its score from 0 to 1."""

    index: int
    score: float


@dataclass
class _Running:
    """One prompt in the batch, and the KV blocks that it may come to need."""

    context: TextContext
    reader: TextReader
    place: int
    blocks: int


class LLM:
    """A model of a Hugging Face directory or hub name. Do not use it from two threads at once.

    `options` are those of `TextPipeline.load`: device, dtype, quantization, max_batch_size, max_length, kv_memory,
    kv_dtype, logit_processors, speculate. `adapters` are directories of LoRA adapters for text, by name. The model is
    loaded by the first call that needs it, once for text and once for each other task; ValueError gives the reason
    when it cannot be.
    """

    def __init__(self, model: str | Path, *, adapters: Mapping[str, str | Path] | None = None, **options: Any) -> None:
        self._model = str(model)
        self._adapters = dict(adapters or {})
        self._options = options
        self._poolers: dict[str, TextPooler] = {}
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="llm", daemon=True).start()

    def generate(
        self, prompts: str | Sequence[str], sampling: Sampling = None, adapter: Adapters = None
    ) -> list[Completion]:
        """Generate one completion for each prompt, in their order.

        `sampling` has a client's values, for all prompts or one for each, over the model's own defaults. `adapter` is
        the name of one for all prompts, or one for each, where None is the model itself. ValueError names what is wrong
        with a request; nothing is generated then.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        values = zip(texts, _for_each(sampling, len(texts)), _names_for_each(adapter, len(texts)), strict=True)
        return self._run(
            [
                TextGenerationRequest(RequestID(), prompt=text, sampling=given, lora_name=name)
                for text, given, name in values
            ]
        )

    def chat(
        self, chats: Chat | Sequence[Chat], sampling: Sampling = None, adapter: Adapters = None
    ) -> list[Completion]:
        """Generate one answer for each chat, which is a list of messages `{"role": ..., "content": ...}`."""
        several: Any = [chats] if _is_one(chats) else chats
        values = zip(several, _for_each(sampling, len(several)), _names_for_each(adapter, len(several)), strict=True)
        return self._run(
            [
                TextGenerationRequest(RequestID(), messages=list(messages), sampling=given, lora_name=name)
                for messages, given, name in values
            ]
        )

    def embed(
        self,
        texts: str | Sequence[str],
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        truncate: bool = False,
    ) -> NDArray[np.float32]:
        """Embed each text: f32[texts, width]. A model that generates embeds, too.

        `prompt_name` is one of the checkpoint's prompts. `dimensions` cut a vector before `normalize` gives it the
        length 1. ValueError for a text that is too long, by its place, unless `truncate` cuts it.
        """
        several = [texts] if isinstance(texts, str) else list(texts)
        if not several:
            return np.empty((0, 0), np.float32)
        return self._pooler("embed").embed(several, prompt_name, dimensions, normalize, truncate)

    def rerank(self, query: str, documents: Sequence[str], instruction: str | None = None) -> list[Ranked]:
        """Score each document for a query, from 0 to 1, and return the places and scores, the best first.

        Documents that are too long are cut. `instruction` is for decoders with a template that takes one.
        """
        if not documents:
            return []
        scores = self._pooler("rerank").scores(query, list(documents), instruction)
        return [Ranked(int(place), float(scores[place])) for place in np.argsort(-scores, kind="stable")]

    def classify(self, texts: str | Sequence[str], truncate: bool = False) -> list[dict[str, float]]:
        """Return the probability of each label by its name, for each text."""
        several = [texts] if isinstance(texts, str) else list(texts)
        return self._pooler("classify").labels(several, truncate) if several else []

    def speak(self, text: str, voice: str | None = None, speed: float = 1.0, seed: int = 0) -> Sound:
        """Speak a text with a model that can. A seed gives the samples that a server gives for it.

        ValueError names what is wrong with the text or the voice.
        """
        return self._speaker.speak(text, voice, speed, seed)

    def paint(self, prompt: str, n: int = 1, **options: Any) -> list[NDArray[np.uint8]]:
        """Paint images [height, width, 3] with a pipeline that can. A seed gives the images that a server gives for it.

        `options` are negative_prompt, size ("auto", or as in "512x768"), steps, guidance_scale and seed. ValueError
        names what is wrong with one.
        """
        return self._painter.paint(Wish(prompt=prompt, count=n, **options))

    def close(self) -> None:
        """End the threads and processes that were started. Idempotent."""
        speaker = self.__dict__.pop("_speaker", None)
        if isinstance(speaker, TokenSpeaker):
            speaker.close()
        pipeline, tokenizer = self.__dict__.pop("_texts", (None, None))
        if pipeline is not None:
            tokenizer.close()
            pipeline.close()
        for pooler in self._poolers.values():
            pooler.close()
        self._poolers.clear()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def _texts(self) -> tuple[TextPipeline, TextTokenizer]:
        pipeline = TextPipeline.load(self._model, **self._options)
        for name, path in self._adapters.items():
            pipeline.load_adapter(name, path)
        return pipeline, TextTokenizer.load(self._model, pipeline.max_length)

    @cached_property
    def _speaker(self) -> TextSpeaker | TokenSpeaker:
        if SpeechTokenFiles.read(self._model) is not None:
            return TokenSpeaker(self._model, self._texts[0])
        return TextSpeaker(self._model, self._options)

    @cached_property
    def _painter(self) -> TextPainter:
        return TextPainter(self._model, self._options)

    @cached_property
    def _task(self) -> str:
        """What the checkpoint was made for."""
        return task_of(self._model)

    def _pooler(self, task: str) -> TextPooler:
        """Return the model for a task. What the checkpoint was made for counts; a model that generates does any."""
        chosen = task if self._task == "generate" else self._task
        if chosen not in self._poolers:
            self._poolers[chosen] = TextPooler(self._model, chosen, self._options)
        return self._poolers[chosen]

    def _run(self, requests: Sequence[TextGenerationRequest]) -> list[Completion]:
        pipeline, tokenizer = self._texts
        waiting: deque[_Running] = deque()
        for place, request in enumerate(requests):
            try:
                context = self._await(tokenizer.new_context(request))
            except ValueError as error:
                raise ValueError(f"request {place}: {error}") from None
            waiting.append(_Running(context, tokenizer.reader(context), place, pipeline.blocks_for(context)))
        found: dict[int, Completion] = {}
        batch: dict[RequestID, _Running] = {}
        try:
            while waiting or batch:
                _fill(batch, waiting, pipeline)
                contexts = [running.context for running in batch.values()]
                outputs = pipeline.execute(TextGenerationInputs([contexts], num_steps=_STEPS_AT_A_TIME))
                for name, output in outputs.items():
                    running = batch[name]
                    running.reader.add(output.tokens, output.final_status)
                    if running.reader.is_done:
                        found[running.place] = _completion(running)
                        pipeline.release(name)
                        del batch[name]
        finally:
            for name in batch:
                pipeline.release(name)
        return [found[place] for place in range(len(requests))]

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return a coroutine's result, also where the caller's thread runs an event loop of its own."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _fill(batch: dict[RequestID, _Running], waiting: deque[_Running], pipeline: TextPipeline) -> None:
    """Admit waiting prompts that are sure to have room until their end."""
    free = pipeline.num_blocks - sum(running.blocks for running in batch.values())
    while waiting and len(batch) < pipeline.max_batch_size and waiting[0].blocks <= free:
        running = waiting.popleft()
        free -= running.blocks
        batch[running.context.request_id] = running


def _completion(running: _Running) -> Completion:
    reader = running.reader
    length = running.context.status is GenerationStatus.MAXIMUM_LENGTH and not reader.stopped
    return Completion(reader.text, reader.token_ids, running.context.prompt_length, "length" if length else "stop")


def _for_each(sampling: Sampling, count: int) -> list[SamplingParamsInput]:
    if sampling is None or isinstance(sampling, SamplingParamsInput):
        return [sampling or SamplingParamsInput()] * count
    if len(sampling) != count:
        raise ValueError(f"sampling has {len(sampling)} entries for {count} prompts: give one for each, or one for all")
    return list(sampling)


def _names_for_each(adapter: Adapters, count: int) -> list[str | None]:
    if adapter is None or isinstance(adapter, str):
        return [adapter] * count
    if len(adapter) != count:
        raise ValueError(f"adapter has {len(adapter)} entries for {count} prompts: give one for each, or one for all")
    return list(adapter)


def _is_one(chats: Any) -> bool:
    """Whether these are the messages of one chat."""
    return bool(len(chats)) and not isinstance(chats[0], list | tuple)
