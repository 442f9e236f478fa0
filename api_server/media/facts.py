"""Facts of the served model's image processor, or of what makes features of its sounds, read once in each API process.

A text to a model with eyes or ears needs no more of media than these, so it never waits for the media process.
"""

from __future__ import annotations

import asyncio
import logging

from api_server.errors import ErrorKind, RequestFailed
from api_server.media.processors import NoProcessor, Processor, Vision
from api_server.media.sound_processors import SoundProcessor
from shared.gguf.format import is_gguf

log = logging.getLogger("tokenyard")


class ImageFacts:
    """The facts of one model, which are read in a thread when they are first wanted."""

    def __init__(self, model: str, most_sound_seconds: float | None = None) -> None:
        """With `most_sound_seconds` the model's media are sounds, none of which is longer."""
        self._model = model
        self._most_sound_seconds = most_sound_seconds
        self._reading: asyncio.Future[Vision] | None = None

    async def warm(self) -> None:
        """Reads the facts of a model whose config has such a tower, so that no request waits for them."""
        if self._most_sound_seconds is not None or await asyncio.to_thread(self._has_tower):
            try:
                await self.read()
            except RequestFailed as error:
                log.info("%s", error)

    async def read(self) -> Vision:
        """The facts. Raises RequestFailed when the model's images or sounds cannot be processed here."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(asyncio.to_thread(self._read))
        try:
            # Other requests may wait for the same reading when this one's client goes away.
            return await asyncio.shield(self._reading)
        except NoProcessor as error:
            media = "images" if self._most_sound_seconds is None else "sounds"
            message = f"this model takes no {media} on this server: {error}"
            raise RequestFailed(ErrorKind.UNSUPPORTED, message) from None

    def _read(self) -> Vision:
        if is_gguf(self._model):
            raise NoProcessor("a GGUF file has the weights of a text model alone")
        if self._most_sound_seconds is None:
            return Processor(self._model, 0).facts
        return SoundProcessor(self._model, self._most_sound_seconds).facts

    def _has_tower(self) -> bool:
        if is_gguf(self._model):
            # transformers would read the whole file, as if it were a config.
            return False
        from transformers import PreTrainedConfig

        try:
            return "vision_config" in PreTrainedConfig.get_config_dict(self._model)[0]
        except (OSError, ValueError):
            return False
