"""What reads the images and sounds of requests for one model: each reader is made when it is first wanted.

Knows the settings and files of the model. Does not know requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from api_server.answers.observer import Observer
from api_server.body.bodies import MAX_BODY_BYTES
from api_server.engine.client import EngineClient
from api_server.media.client import MediaClient
from api_server.media.clips import Clips
from api_server.media.facts import ImageFacts
from api_server.media.images import Images
from api_server.media.originals import Originals
from api_server.media.protocol import Start
from api_server.media.voice_clips import VoiceClips
from api_server.text.speaking_model import SpeakingModel
from shared.listening import listens
from shared.recogniser_files import RecogniserFiles
from shared.setting_checks import parse_memory
from shared.settings import Settings
from shared.tokenizer_files import read_json

# Tokens of an image without --max-image-tokens, on a CPU and on a GPU.
_IMAGE_TOKENS_ON_CPU = 1280
_IMAGE_TOKENS_ON_GPU = 4096
# Tokens of a video without --max-video-tokens, as a multiple of those of an image.
_VIDEO_FACTOR = 4


@dataclass
class MediaReaders:
    """What reads the images, videos and sounds of requests, by the files of one model.

    `image_key` is the key of the hashes of images. `observers` returns the observers that hear of each file read.
    """

    settings: Settings
    engine: EngineClient
    recogniser: RecogniserFiles | None
    speaking: SpeakingModel | None
    image_key: bytes
    observers: Callable[[], Sequence[Observer]]

    @cached_property
    def has_ears(self) -> bool:
        """True when the model hears, whatever its workers take."""
        return listens(read_json(self.settings.model, "config.json"))

    @cached_property
    def originals(self) -> Originals:
        """The images of requests that are painted anew. Made for a model that paints."""
        return Originals(MediaClient({"edits": True}), self.engine.segments)

    @cached_property
    def clips(self) -> Clips:
        """The sound files of requests. Made for a model that transcribes."""
        assert self.recogniser is not None
        form = self.recogniser.mel
        client = MediaClient({"model": self.settings.model, "mel": asdict(form)})
        return Clips(
            form,
            client,
            self.engine.segments,
            self.image_key,
            most_bytes=MAX_BODY_BYTES,
            most_seconds=self.settings.max_audio_seconds,
            observe=self._observe_clip,
        )

    @cached_property
    def voice_clips(self) -> VoiceClips:
        """The clips of voices to imitate. Made for a model that generates speech tokens."""
        assert self.speaking is not None
        rate = self.speaking.files.codec.clip_rate
        return VoiceClips(rate, self.engine.segments, self.image_key, self._observe_clip)

    @cached_property
    def images(self) -> Images:
        """The images, or the sounds, of requests. Made for a model that sees or listens."""
        most = self.settings.max_image_tokens or self._image_tokens()
        most_of_video = self.settings.max_video_tokens or most * _VIDEO_FACTOR
        start: Start = {"model": self.settings.model, "most_tokens": most, "most_video_tokens": most_of_video}
        if self.has_ears:
            start = {"model": self.settings.model, "most_seconds": self.settings.max_audio_seconds}
        most_bytes = parse_memory(self.settings.media_cache, "media_cache") or 0
        return Images(
            self.image_facts,
            MediaClient(start),
            (most, most_of_video),
            self.engine.segments,
            most_bytes,
            self.image_key,
            observe=self._observe_image,
            most_videos=self.settings.limit_images,
            heard=self._observe_clip,
        )

    @cached_property
    def image_facts(self) -> ImageFacts:
        return ImageFacts(self.settings.model, self.settings.max_audio_seconds if self.has_ears else None)

    async def close(self) -> None:
        """Ends the processes that read images and sound, as far as there are any."""
        for name in ("images", "clips", "originals", "voice_clips"):
            if name in self.__dict__:
                await self.__dict__[name].client.close()

    def _image_tokens(self) -> int:
        workers = self.engine.status.workers if self.engine.status else []
        on_gpu = any(worker.device.startswith("cuda") for worker in workers)
        return _IMAGE_TOKENS_ON_GPU if on_gpu else _IMAGE_TOKENS_ON_CPU

    def _observe_image(self, seconds: float) -> None:
        for observer in self.observers():
            observer.image(seconds)

    def _observe_clip(self, seconds: float, took: float) -> None:
        for observer in self.observers():
            observer.clip(seconds, took)
