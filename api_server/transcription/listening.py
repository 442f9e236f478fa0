"""Transcribes a sound by a model that hears and generates text: one request, as a chat about the sound would be.

Knows what such models are asked for a transcript. Knows no dialect.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from api_server.answers.choice import complete
from api_server.chat.media_parts import LoadedSound, arguments
from api_server.errors import unsupported
from api_server.generation.generation import Generation
from api_server.generation.preparation import Prepared, prepare
from api_server.state import ServerState
from api_server.transcription.transcriber import Wish, check_prompt
from interfaces import SamplingParamsInput, TextContentPart, TextGenerationRequest, TextGenerationRequestMessage
from shared.tokenizer_files import read_json

_QUESTION = "Transcribe the speech. Answer with its words alone."
# Families whose question stands before the sound.
_QUESTION_FIRST = ("audioflamingo3",)
# The most tokens of a transcript: as many as stand for its sound, of which no family has fewer than 12.5 a second, and
# these. Nobody speaks faster, so only a model that repeats itself is stopped.
_MORE_TOKENS = 64
# Mistral's form of the task, for models whose vocabulary has it.
_TASK = "[TRANSCRIBE]"


class Listening:
    """One sound on its way through the model. `close` cancels what still runs."""

    def __init__(self, server: ServerState, prepared: Prepared) -> None:
        self._generation = Generation(server, [prepared])
        self._tokens = prepared.prompt.vision_token_ids

    @staticmethod
    async def prepared(server: ServerState, data: bytes, wish: Wish) -> Prepared:
        """Read a sound file. Raises RequestFailed, also for a wish that the model has no place for."""
        request = _request(server, LoadedSound(data=data, field="file"), wish)
        (found,) = await prepare(server, [request])
        most = _sound_tokens(found.prompt.tokens, found.prompt.vision_token_ids) + _MORE_TOKENS
        given = found.sampling.max_new_tokens
        bounded = most if given is None else min(given, most)
        return replace(found, sampling=replace(found.sampling, max_new_tokens=bounded))

    @property
    def text(self) -> str:
        """The text so far."""
        return self._generation.choices[0].text.strip()

    @property
    def usage(self) -> dict[str, Any]:
        """The tokens that count, in OpenAI's form."""
        choice = self._generation.choices[0]
        sound = _sound_tokens(choice.prompt_token_ids, self._tokens)
        return {
            "type": "tokens",
            "input_tokens": choice.prompt_tokens,
            "input_token_details": {"audio_tokens": sound, "text_tokens": choice.prompt_tokens - sound},
            "output_tokens": choice.completion_tokens,
            "total_tokens": choice.prompt_tokens + choice.completion_tokens,
        }

    def close(self) -> None:
        """Cancels what still runs. Idempotent."""
        self._generation.close()

    async def collect(self) -> None:
        """Runs to the end. Raises RequestFailed."""
        async for _ in self.deltas():
            pass

    async def deltas(self) -> AsyncIterator[str]:
        """The text piece by piece. Blanks at its end are held back: they may be the last ones. Raises RequestFailed."""
        sent = 0
        try:
            async for _ in self._generation:
                text = self.text
                if len(text) > sent:
                    yield text[sent:]
                    sent = len(text)
            complete(self._generation.choices[0].finish)
        finally:
            self.close()


def _sound_tokens(prompt: NDArray[np.signedinteger[Any]], standing: Sequence[int]) -> int:
    """The number of a prompt's tokens that stand for sound."""
    return int(np.isin(prompt, standing).sum())


def _request(server: ServerState, sound: LoadedSound, wish: Wish) -> TextGenerationRequest:
    """The request for a transcript. Raises RequestFailed."""
    common: dict[str, Any] = {
        "model_name": wish.model_name,
        "request_path": wish.path,
        "sampling": SamplingParamsInput(temperature=wish.temperature),
        "received": wish.received,
        **arguments([], (), [sound]),
    }
    check_prompt(wish.prompt)
    if server.tokenizer.token_of(_TASK) is not None:
        if wish.prompt.strip():
            raise unsupported("prompt", "text before a transcript")
        language = f"lang:{wish.language}" if wish.language else ""
        prompt = f"[INST][BEGIN_AUDIO][AUDIO][/INST]{language}{_TASK}"
        return TextGenerationRequest(wish.request_id, prompt=prompt, **common)
    if wish.language:
        raise unsupported("language", "naming the language, which this model finds out by itself,")
    files = read_json(server.settings.model, "processor_config.json")
    question = wish.prompt.strip() or str(files.get("default_transcription_prompt") or _QUESTION)
    parts = [sound, TextContentPart(text=question)]
    if read_json(server.settings.model, "config.json").get("model_type") in _QUESTION_FIRST:
        parts.reverse()
    message = TextGenerationRequestMessage(role="user", content=parts)
    return TextGenerationRequest(wish.request_id, messages=[message], **common)
