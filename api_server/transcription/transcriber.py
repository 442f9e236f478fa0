"""Transcribes a clip, window by window, through the path that all generation takes.

Each window is a prompt whose first tokens stand for its sound. With timestamps the next window begins at the end of the
last complete segment, so no word is lost where windows join. Knows no dialect.
"""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from api_server import access_log
from api_server.answers.choice import Choice, Finish, complete
from api_server.engine import scheduling
from api_server.errors import RequestFailed, invalid, unsupported
from api_server.generation.generation import Generation
from api_server.generation.preparation import Prepared
from api_server.media.clips import Clip
from api_server.media.images import ProcessedImage
from api_server.state import ServerState
from api_server.text.image_prompt import PlacedImage
from api_server.text.tokenizer import Prompt
from api_server.transcription.alignment import token_times
from api_server.transcription.prompts import prompt_of, rules_of
from api_server.transcription.segments import Cut, Span, cut_at_timestamps
from api_server.transcription.words import Word, words_of
from interfaces import LogprobMode, RequestID, SamplingParams, TextGenerationRequest
from shared.recogniser_files import TIME_PRECISION, RecogniserFiles

# Characters of the text before a transcript, of which the end counts.
LONGEST_PROMPT = 10_000


@dataclass(frozen=True)
class Wish:
    """What a request asks for. `language` is a code; None: it is to be found out."""

    request_id: RequestID
    path: str
    model_name: str
    task: str = "transcribe"
    language: str | None = None
    prompt: str = ""
    temperature: float = 0.0
    timestamps: bool = False
    # Whether the times of words are wanted, beside those of segments.
    words: bool = False
    # Arrival of the request, by `time.monotonic()`.
    received: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Segment:
    """A part of a transcript with its times in seconds. `seek` is the first frame of its window."""

    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    mean_logprob: float
    no_speech: float

    @property
    def compression_ratio(self) -> float:
        data = self.text.encode()
        return len(data) / len(zlib.compress(data)) if data else 1.0


def check_prompt(prompt: str) -> None:
    """Raises RequestFailed for too long a text."""
    if len(prompt) > LONGEST_PROMPT:
        raise invalid(f"prompt has {len(prompt)} characters; at most {LONGEST_PROMPT} are possible", "prompt")


class Transcription:
    """One clip on its way through the model. `close` cancels what still runs."""

    def __init__(self, server: ServerState, clip: Clip, wish: Wish) -> None:
        assert server.recogniser is not None
        self._server = server
        self._files: RecogniserFiles = server.recogniser
        self._clip = clip
        self._wish = wish
        self._generation: Generation | None = None
        frames = clip.features.shape[1]
        self._timestamps = wish.timestamps or frames > self._files.mel.frames
        if self._timestamps and self._files.no_timestamps is None:
            longest = f"at most {self._files.mel.seconds:g} s of sound, and no times, are possible"
            raise invalid(f"file: this model has no timestamps: {longest}", "file")
        if wish.words and not self._files.alignment_heads:
            raise unsupported("timestamp_granularities", "the time of each word, for which the model names no heads,")
        self._previous = self._ids_of(wish.prompt)
        self.language = wish.language
        self.segments: list[Segment] = []
        # In order; empty unless they are wanted.
        self.words: list[Word] = []
        # The time of the token before the next segment.
        self._last_time = 0.0
        # The text of all deltas.
        self._sent = ""
        # What observers see: one answer. Its tokens are those of the text before the transcript, and its own.
        self._answer: Choice | None = None
        self._is_reported = False
        limit = scheduling.current.get().total_seconds
        self._deadline = None if limit is None else time.monotonic() + limit

    @property
    def seconds(self) -> float:
        """The length of the sound."""
        return self._clip.seconds

    @property
    def wants_words(self) -> bool:
        """Whether the times of words were asked for."""
        return self._wish.words

    @property
    def attention_bytes(self) -> int:
        """The most memory that the attention of one window's tokens takes, of which the times of words are made."""
        heads = len(self._files.alignment_heads) if self._wish.words else 0
        return 4 * heads * self._files.source_positions * self._files.target_positions

    @property
    def usage(self) -> dict[str, Any]:
        """What counts, in OpenAI's form."""
        return {"type": "duration", "seconds": math.ceil(self.seconds)}

    @property
    def text(self) -> str:
        """The text of all segments so far."""
        return "".join(segment.text for segment in self.segments).strip()

    def close(self) -> None:
        """Cancels what still runs. Idempotent."""
        if self._generation is not None:
            self._generation.close()
        if self._answer is not None and not self._is_reported:
            self._is_reported = True
            for observer in self._server.observers:
                observer.abandoned(self._answer)

    async def collect(self) -> None:
        """Runs to the end. Raises RequestFailed."""
        async for _ in self.deltas():
            pass

    async def deltas(self) -> AsyncIterator[str]:
        """The text piece by piece: of a short clip token by token, else segment by segment. Raises RequestFailed."""
        total = self._clip.features.shape[1]
        seek = 0
        answer = self._answer or self.begin()
        try:
            if self.language is None and self._files.languages:
                self.language = await self._detected_language()
            while seek < total:
                frames = min(self._files.mel.frames, total - seek)
                no_speech = await self._silence(seek) if self._wish.timestamps else 0.0
                tokens = prompt_of(self._files, self.language, self._wish.task, self._previous, self._timestamps)
                generation = self._started(seek, tokens, self._sampling(len(tokens)))
                async for text in self._texts_of(generation, answer):
                    if delta := self._delta(text):
                        yield delta
                seek += await self._take(generation.choices[0], seek, frames, no_speech)
                if delta := self._delta(self.text):
                    yield delta
            self._end(Finish("stop_token", self._files.end))
        except RequestFailed as error:
            if not self._is_reported:
                self._is_reported = True
                for observer in self._server.observers:
                    observer.choice_failed(answer, error)
            raise
        finally:
            self.close()

    def begin(self) -> Choice:
        """Start the answer that observers see. From now on `close` reports its end."""
        tokens = prompt_of(self._files, self.language, self._wish.task, self._previous, self._timestamps)
        item = self._prepared(tokens, self._sampling(len(tokens)))
        tenant = scheduling.current.get().tenant
        model = self._server.model_name
        answer = Choice(0, item.request, 0, None, item.context(0), tenant=tenant, model=model)
        answer.submitted = time.monotonic()
        self._answer = answer
        if (entry := access_log.current.get()) is not None:
            entry.choices.append([answer])
        for observer in self._server.observers:
            observer.started(answer)
        return answer

    def _count(self, answer: Choice, window: Choice, count: int) -> None:
        """Counts tokens that a window has got."""
        answer.queued = window.queued if answer.queued is None else answer.queued
        if not count:
            return
        now = time.monotonic()
        since = now - (answer.last_token or answer.submitted)
        answer.first_token = answer.first_token or now
        answer.last_token = now
        for observer in self._server.observers:
            observer.tokens(answer, count, since)
        answer.completion_tokens += count

    def _end(self, finish: Finish) -> None:
        """Reports the end of the answer."""
        assert self._answer is not None
        self._answer.finish = finish
        self._is_reported = True
        for observer in self._server.observers:
            observer.finished(self._answer)

    async def _texts_of(self, generation: Generation, answer: Choice) -> AsyncIterator[str]:
        """The text so far, with each token. With timestamps a window's end may be dropped, so nothing comes then."""
        choice = generation.choices[0]
        detokenizer = self._server.tokenizer.detokenizer([], True)
        text = ""
        shown = 0
        async for _ in generation:
            fresh = self._text_tokens(choice.token_ids[shown:])
            self._count(answer, choice, choice.completion_tokens - shown)
            shown = choice.completion_tokens
            text += "".join(map(detokenizer.add, fresh))
            if not self._timestamps:
                yield text

    def _delta(self, text: str) -> str:
        """What is new in the text so far. Blanks at its end are held back: they may be the last ones."""
        whole = text.strip()
        new = whole[len(self._sent) :]
        self._sent = whole
        return new

    async def _take(self, choice: Choice, seek: int, frames: int, no_speech: float) -> int:
        """Takes the segments of a window's tokens. Returns the number of frames that are done."""
        if choice.finish is not None and choice.finish.kind == "cancelled":
            self._end(choice.finish)
        complete(choice.finish)
        tokens = choice.token_ids
        times = await self._times(choice, seek) if self._wish.words else []
        if tokens and tokens[-1] == self._files.end:
            tokens.pop()
        if self._timestamps:
            cut = cut_at_timestamps(tokens, seek, frames, self._files)
        else:
            # A model may write timestamps although it was asked for none. What was sent must not be dropped.
            cut = Cut([Span(0.0, self.seconds, tokens)], frames)
        for span in cut.spans:
            if self._wish.words:
                self._add_words(span.tokens, times[: len(span.tokens)])
                del times[: len(span.tokens)]
            self.segments.append(await self._segment(span, seek, choice.mean_logprob, no_speech))
        # A window that ended where it began would come again for ever.
        return cut.frames if cut.frames > 0 else frames

    async def _times(self, choice: Choice, seek: int) -> list[float]:
        """The time at which each token of a window ends, in seconds of the clip."""
        files = self._files
        first = choice.prompt_tokens
        weights = [choice.hidden[first + i] for i in range(len(choice.token_ids) - 1)]
        if not weights:
            return [min(seek / 2 * TIME_PRECISION, self.seconds)] * len(choice.token_ids)
        shaped = np.array(weights, np.float32).reshape(len(weights), len(files.alignment_heads), -1)
        # A window may begin behind the sound, in the silence that fills the first one up.
        frames = max(2, math.ceil(round(self.seconds * files.mel.rate) / files.mel.hop) - seek)
        ends = await asyncio.to_thread(token_times, shaped[..., : frames // 2], files.median_filter_width)
        offset = np.float32(seek / 2 * TIME_PRECISION)
        return [min(float(np.float32(end) + offset), self.seconds) for end in ends]

    def _add_words(self, tokens: Sequence[int], ends: Sequence[float]) -> None:
        """Takes the words of a segment, whose tokens end at these times."""
        starts = [self._last_time, *ends]
        text = set(self._text_tokens(tokens))
        kept = [i for i, token in enumerate(tokens) if token in text]
        times = [(round(min(starts[i], ends[i]), 2), round(ends[i], 2)) for i in kept]
        backend = self._server.tokenizer.backend
        decode = partial(backend.decode, skip_special_tokens=False)
        self.words += words_of([tokens[i] for i in kept], times, self.language, decode)
        if ends:
            self._last_time = ends[-1]

    async def _segment(self, span: Span, seek: int, mean_logprob: float, no_speech: float) -> Segment:
        text = await self._server.tokenizer.decode(self._text_tokens(span.tokens), skip_special_tokens=True)
        # A window that is filled up with silence is longer than its sound.
        start = min(span.start, self.seconds)
        end = min(span.end, self.seconds)
        return Segment(seek, start, end, text, span.tokens, self._wish.temperature, mean_logprob, no_speech)

    def _text_tokens(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that are text: timestamps and control tokens are none."""
        special = self._server.tokenizer.is_special
        return [token for token in tokens if token < self._files.first_timestamp and not special(token)]

    def _ids_of(self, prompt: str) -> list[int]:
        """The tokens of a text that goes before the transcript. Raises RequestFailed."""
        check_prompt(prompt)
        tokens = self._server.tokenizer.exact(f" {prompt.strip()}") if prompt.strip() else []
        control = next((token for token in tokens if token not in self._text_tokens([token])), None)
        if control is not None:
            name = self._server.tokenizer.token_text(control)
            raise invalid(
                f"prompt must be plain text, and it has the model's token {name!r:.60}: leave it out", "prompt"
            )
        return tokens

    async def _detected_language(self) -> str:
        """The language that the model takes the first window for."""
        codes = {token: code for code, token in self._files.languages.items()}
        sampling = SamplingParams(temperature=0.0, max_new_tokens=1, allowed_token_ids=list(codes))
        generation = self._started(0, [self._files.start], sampling)
        await generation.collect()
        found = generation.choices[0].token_ids
        return codes.get(found[0], next(iter(codes.values()))) if found else next(iter(codes.values()))

    async def _silence(self, seek: int) -> float:
        """The probability that a window has no speech."""
        if self._files.no_speech is None:
            return 0.0
        sampling = SamplingParams(temperature=0.0, max_new_tokens=1, logprob_ids=[self._files.no_speech])
        generation = self._started(seek, [self._files.start], sampling, token_details=True)
        await generation.collect()
        details = generation.choices[0].tokens
        return float(np.exp(details[0].asked.get(self._files.no_speech, -np.inf))) if details else 0.0

    def _sampling(self, prompt: int) -> SamplingParams:
        return SamplingParams(
            temperature=self._wish.temperature,
            max_new_tokens=self._files.target_positions - prompt,
            stop_token_ids=[self._files.end],
            logprobs=LogprobMode.TEMPERED,
            named_processors=rules_of(self._files, self._timestamps),
        )

    def _started(
        self, seek: int, tokens: list[int], sampling: SamplingParams, token_details: bool = False
    ) -> Generation:
        """Sends a window with these tokens behind it to the model."""
        # What was admitted once goes on: it has no limit in the queue, and is not refused for the queue's length.
        again = self._generation is not None
        given = scheduling.current.get()
        # All windows together have the request's time.
        left = None if self._deadline is None else max(0.001, self._deadline - time.monotonic())
        queue_seconds = None if again else given.queue_seconds
        scheduling.current.set(replace(given, total_seconds=left, queue_seconds=queue_seconds))
        files = self._files
        features, named = self._clip.window(seek, files.mel.frames)
        image = ProcessedImage({"pixel_values": features}, "", named)
        placed = PlacedImage(0, files.clip_tokens, image)
        ids = [files.placeholder] * files.clip_tokens + tokens
        # What comes in place of hidden states is not wanted of the window's first questions.
        aligned = self._wish.words and sampling.max_new_tokens != 1
        item = self._prepared(ids, sampling, (placed,), token_details, len(ids) if aligned else None)
        self._generation = Generation(self._server, [item], part=True, again=again)
        return self._generation

    def _prepared(
        self,
        ids: list[int],
        sampling: SamplingParams,
        images: tuple[PlacedImage, ...] = (),
        token_details: bool = False,
        hidden_from: int | None = None,
    ) -> Prepared:
        request = TextGenerationRequest(
            self._wish.request_id,
            model_name=self._wish.model_name,
            request_path=self._wish.path,
            prompt=ids,
            sampling_params=sampling,
            token_details=token_details,
            hidden_states=hidden_from is not None,
            hidden_from=hidden_from or 0,
            received=self._wish.received,
        )
        prompt = Prompt(None, np.array(ids, np.int32), (), images, (self._files.placeholder,) if images else ())
        return Prepared(request, prompt, sampling)
