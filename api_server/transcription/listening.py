"""Transcribes a sound by a model that hears and generates text: one request, as a chat about the sound would be.

Knows what such models are asked for a transcript. Knows no dialect.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np

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
        return found

    @property
    def text(self) -> str:
        """The text so far."""
        return self._generation.choices[0].text.strip()

    @property
    def usage(self) -> dict[str, Any]:
        """The tokens that count, in OpenAI's form."""
        choice = self._generation.choices[0]
        sound = int(np.isin(choice.prompt_token_ids, self._tokens).sum())
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
