"""The facts of a served model that makes vectors or labels of texts instead of generating."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

from api_server.errors import invalid
from shared.pixel_files import PixelFiles
from shared.pooling_files import PoolingFiles, pooling_modes, task_of
from shared.settings import Settings
from shared.speech_files import SpeechFiles

# What a server with each task does, in words.
IN_WORDS = {
    "generate": "generates text",
    "embed": "makes vectors of texts",
    "embed_tokens": "makes a vector of each token",
    "sparse": "makes sparse vectors of texts",
    "rerank": "scores documents for a query",
    "classify": "classifies texts",
    "classify_tokens": "classifies tokens",
    "speak": "speaks texts",
    "paint": "paints images",
    "transcribe": "transcribes speech",
}

# A route of each task, for errors.
ROUTES_OF_TASK = {
    "generate": "/v1/chat/completions",
    "embed": "/v1/embeddings",
    "embed_tokens": "/pooling",
    "sparse": "/embed_sparse",
    "rerank": "/v1/rerank",
    "classify": "/classify",
    "classify_tokens": "/pooling",
    "speak": "/v1/audio/speech",
    "paint": "/v1/images/generations",
    "transcribe": "/v1/audio/transcriptions",
}


@dataclass(frozen=True)
class PooledModel:
    """The task of this server, one of `IN_WORDS` but generate, and what the checkpoint's files say."""

    task: str
    files: PoolingFiles
    # How texts are read and which voices there are; None for a model that does not speak.
    speech: SpeechFiles | None = None
    # Sizes and steps of images; None for a model that does not paint.
    pixels: PixelFiles | None = None

    @classmethod
    def of(cls, settings: Settings) -> Self | None:
        """The facts of the served model, or None if it generates. Raises ValueError for files that are broken."""
        if not settings.model:
            return None
        task = task_of(settings.model, settings.task)
        if task == "generate":
            return None
        files = PoolingFiles.read(settings.model)
        # Broken rules of late interaction end the start, and not requests.
        _ = files.late_interaction
        speech = SpeechFiles.read(settings.model) if task == "speak" else None
        return cls(task, files, speech, PixelFiles.read(settings.model) if task == "paint" else None)

    @property
    def pooling(self) -> str:
        """How the vectors of tokens become one, in the words of the checkpoint's files; empty if they do not say."""
        if self.task == "sparse":
            return "splade"
        return "+".join(mode for module in self.files.of_kind("Pooling") for mode in pooling_modes(module))

    @cached_property
    def prompts(self) -> dict[str, str]:
        return self.files.prompts

    def prompted(self, text: str, prompt: str) -> str:
        """A text as the model's tokenizer gets it."""
        return f"{prompt}{text.lower() if self.files.lower_case else text}"

    def prompt(self, name: str | None, field: str) -> str:
        """The text of a prompt, without a name that of the default prompt. Raises RequestFailed."""
        try:
            return self.files.prompt(name)
        except ValueError as error:
            raise invalid(str(error), field) from None
