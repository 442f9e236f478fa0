"""A client's request, in one form for all dialects: text, embeddings or images. Speech is in `audio.py`.

A dialect maps its body to one of these and does not know the code that follows; that code does not know the dialect.
The values here are the client's: defaults of the model, tokens and limits are added later.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interfaces.base.request_id import Request, RequestID, RequestType
from interfaces.request.chat import (
    ImageContentPart,
    SoundContentPart,
    TextGenerationRequestMessage,
    TextGenerationRequestTool,
    TextGenerationResponseFormat,
    VideoContentPart,
)
from interfaces.request.constraint import Constraint
from interfaces.request.sampling import SamplingParams, SamplingParamsInput

__all__ = [
    "EmbeddingsGenerationRequest",
    "ImageWishes",
    "PixelGenerationRequest",
    "Request",
    "RequestType",
    "TextGenerationRequest",
    "VideoWishes",
]


@dataclass(frozen=True)
class ImageWishes:
    """The wishes of a client for one image of a request."""

    # The name of the image in errors: the client's own path to it.
    field: str = "images"
    # "low", "high", "auto" or "original".
    detail: str = "auto"
    # Bounds of the pixels that the model sees, where it takes images of any size.
    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True)
class VideoWishes:
    """The wishes of a client for one video of a request."""

    # The name of the video in errors: the client's own path to it.
    field: str = "videos"
    # Frames for each second: those that the model is shown, or those that a list of frames has. None: the model's own.
    fps: float | None = None
    # Number of frames that the model is shown, of a video file.
    num_frames: int | None = None
    # Bounds of the pixels that the model sees, where it takes videos of any size.
    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True)
class TextGenerationRequest(Request):
    """One prompt, to be answered `n` times. A batch of prompts is a list of these, given to one `generate` call.

    Plain dicts are taken for messages and the response format, and None for lists. ValueError or TypeError for values
    that cannot belong together; the process that answers checks that there is a prompt at all.
    """

    # The name in logs; clients may choose it, so it need not be unique.
    request_id: RequestID

    model_name: str = ""
    # Text, or token ids; instead of `messages`.
    prompt: str | Sequence[int] | None = None

    # The conversation, for the chat template.
    messages: list[TextGenerationRequestMessage] = field(default_factory=list)

    # Encoded images, one for each image part of the messages, in order. A text prompt, or one of token ids, has a
    # placeholder for each.
    images: list[bytes] = field(default_factory=list)

    tools: Sequence[TextGenerationRequestTool | Mapping[str, Any]] | None = None
    response_format: TextGenerationResponseFormat | None = None
    # The time at which the server received it, in nanoseconds.
    timestamp_ns: int = 0

    request_path: str = "/"
    # Most probable tokens to report for each generated token; 0: no log probabilities.
    logprobs: int = 0

    # Whether the answer begins with the prompt.
    echo: bool = False

    # Further stop strings, beside `sampling_params.stop`, which has them all.
    stop: str | list[str] | None = None

    # Further variables of the chat template (`enable_thinking`...).
    chat_template_options: Mapping[str, Any] | None = None

    # Final values. They do not count when `sampling` is given.
    sampling_params: SamplingParams = field(default_factory=SamplingParams)

    _: KW_ONLY
    # Encoded videos, as `images`. A list: encoded images that are the frames of one video.
    videos: list[bytes | list[bytes]] = field(default_factory=list)
    # One for each image; empty: none has any.
    image_wishes: list[ImageWishes] = field(default_factory=list)
    # One for each video; empty: none has any.
    video_wishes: list[VideoWishes] = field(default_factory=list)
    # Sound files, as `images`.
    sounds: list[bytes] = field(default_factory=list)
    # The client's own path to each sound, for errors; empty: sounds[i].
    sound_fields: list[str] = field(default_factory=list)
    # Address of the engine that must serve it; None: any.
    target_endpoint: str | None = None

    dkv_cache_hint: dict[str, Any] | None = None
    # The place in a batch; carried, not used.
    index: int | None = None

    # The name of the adapter; None: `model_name` names it.
    lora_name: str | None = None

    # The client's values, to be laid over the model's defaults. `sampling.stop` are the stop strings,
    # `sampling.max_new_tokens` the length that was asked for explicitly.
    sampling: SamplingParamsInput | None = None

    # Whether generation_config.json fills what `sampling` leaves open. Its EOS ids apply in any case.
    model_defaults: bool = True

    # The form that the answer must have; wins over `response_format`.
    constraint: Constraint | None = None

    # Names of tools, of which the answer must call one at least. None: the model decides.
    forced_tools: Sequence[str] | None = None

    # Whether one answer may have several calls; otherwise it ends with the first.
    parallel_tool_calls: bool = True

    # A text that introduces the tools to a model whose chat template has no place for them.
    tool_prompt: str | None = None

    # The beginning of the answer, as part of the prompt, unless the chat template has written it already.
    opening: str = ""

    # Whether reasoning and tool calls are separated from the text.
    parse_answer: bool = False

    # With `parse_answer`: whether reasoning is left out of the text.
    separate_reasoning: bool = True

    # Whether reasoning comes as it is written; otherwise at once, when it is complete.
    stream_reasoning: bool = True

    # Most tokens of reasoning: then it is ended, and the answer begins.
    max_thinking_tokens: int | None = None

    # The dialect's length when none was asked for, cut to what fits. None: the model's, else all that fits.
    default_max_new_tokens: int | None = None

    # Whether a requested length that does not fit is cut to what fits, instead of being refused.
    clamp_max_new_tokens: bool = False

    add_generation_prompt: bool = True
    # Whether the answer continues the last message instead of opening a new one.
    continue_final_message: bool = False

    # Whether the tokenizer adds its own (BOS...). None: for a text prompt yes, after a chat template no.
    add_special_tokens: bool | None = None

    # Keep only the LAST n tokens of the prompt.
    truncate_prompt_to: int | None = None

    n: int = 1
    # Whether the answer keeps the stop string or stop token that ended it (special tokens are still skipped).
    keep_stop: bool = False

    # Regular expressions (RE2's syntax) that end the answer when they match in it; the match stays.
    stop_patterns: list[str] = field(default_factory=list)

    skip_special_tokens: bool = True
    # Whether `TextDelta.tokens` is wanted: costs a second detokenization per token.
    token_details: bool = False

    # Whether the hidden states of tokens are wanted: those from index `hidden_from` on.
    hidden_states: bool = False
    hidden_from: int = 0

    # Vectors that stand for the embeddings of the prompt's tokens; `prompt` then has as many ids, of no meaning.
    prompt_embeddings: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)

    # Requests share cached prompt prefixes only with requests of the same salt.
    cache_salt: str = ""

    # `time.monotonic()` when the request's head had arrived.
    received: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._convert()
        if self.prompt and self.messages:
            raise ValueError("prompt and messages exclude each other: give one of them")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")
        if self.max_thinking_tokens is not None and self.max_thinking_tokens < 0:
            raise ValueError(f"max_thinking_tokens must be at least 0, got {self.max_thinking_tokens}")
        if self.images or self.videos or self.sounds:
            self._check_media()

    __str__ = Request.__str__

    @property
    def most_calls(self) -> int | None:
        """The number of calls that end the answer; None: the model ends it.

        Forced calls are as many as there are tools to call: where every continuation is a call, a model may not find an
        end.
        """
        if not self.parallel_tool_calls:
            return 1
        return None if self.forced_tools is None else len(self.forced_tools)

    @cached_property
    def number_of_images(self) -> int:
        """The image parts in the messages."""
        return sum(message.count(ImageContentPart) for message in self.messages)

    @cached_property
    def number_of_videos(self) -> int:
        """The video parts in the messages."""
        return sum(message.count(VideoContentPart) for message in self.messages)

    @cached_property
    def number_of_sounds(self) -> int:
        """The sound parts in the messages."""
        return sum(message.count(SoundContentPart) for message in self.messages)

    def _convert(self) -> None:
        """Bring the looser forms of fields into the declared ones. Idempotent."""
        put = object.__setattr__
        put(self, "request_id", RequestID(self.request_id))
        put(self, "messages", [_message(message, i) for i, message in enumerate(self.messages or ())])
        put(self, "images", list(self.images or ()))
        put(self, "videos", list(self.videos or ()))
        put(self, "sounds", list(self.sounds or ()))
        if self.response_format is not None:
            put(self, "response_format", TextGenerationResponseFormat.of(self.response_format))
        if self.stop:
            more = [self.stop] if isinstance(self.stop, str) else list(self.stop)
            put(self, "sampling_params", replace(self.sampling_params, stop=_joined(self.sampling_params.stop, more)))
            if self.sampling is not None:
                put(self, "sampling", replace(self.sampling, stop=_joined(self.sampling.stop, more)))

    def _check_media(self) -> None:
        if self.image_wishes and len(self.image_wishes) != len(self.images):
            raise ValueError(f"image_wishes has {len(self.image_wishes)} items for {len(self.images)} images")
        if self.video_wishes and len(self.video_wishes) != len(self.videos):
            raise ValueError(f"video_wishes has {len(self.video_wishes)} items for {len(self.videos)} videos")
        if self.sound_fields and len(self.sound_fields) != len(self.sounds):
            raise ValueError(f"sound_fields has {len(self.sound_fields)} items for {len(self.sounds)} sounds")
        if not self.messages:
            return
        for what, given, parts in (
            ("images", len(self.images), self.number_of_images),
            ("videos", len(self.videos), self.number_of_videos),
            ("sounds", len(self.sounds), self.number_of_sounds),
        ):
            if given and given != parts:
                raise ValueError(f"{what} has {given} items for {parts} parts of the messages: give one for each")


@dataclass(frozen=True)
class EmbeddingsGenerationRequest(Request):
    """One text, or its token ids, to be embedded."""

    request_id: RequestID
    model_name: str
    input: str | Sequence[int]
    _: KW_ONLY
    # Keep this many leading numbers of the embedding, for models that were made for it.
    dimensions: int | None = None

    normalize: bool = True
    # Keep only the FIRST n tokens of the input. None: a longer one is refused.
    truncate_to: int | None = None

    request_path: str = "/"
    timestamp_ns: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "request_id", RequestID(self.request_id))
        if not len(self.input):
            raise ValueError("input must not be empty")
        for name in ("dimensions", "truncate_to"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    __str__ = Request.__str__


@dataclass(frozen=True)
class PixelGenerationRequest(Request):
    """A description to be drawn. None leaves a value to the model."""

    request_id: RequestID
    model_name: str
    prompt: str
    _: KW_ONLY
    negative_prompt: str | None = None
    # Encoded images to start from.
    images: list[bytes] = field(default_factory=list)

    height: int | None = None
    width: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float = 3.5
    num_images_per_prompt: int = 1
    seed: int | None = None
    request_path: str = "/"
    timestamp_ns: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "request_id", RequestID(self.request_id))
        if not self.prompt:
            raise ValueError("prompt must not be empty")
        for name in ("height", "width", "num_inference_steps", "num_images_per_prompt"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.guidance_scale < float("inf"):
            raise ValueError(f"guidance_scale must be at least 0 and finite, got {self.guidance_scale}")

    __str__ = Request.__str__


def _message(given: Any, index: int) -> TextGenerationRequestMessage:
    if isinstance(given, TextGenerationRequestMessage):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"messages[{index}] must be a message or a dict, got {type(given).__name__}")
    return TextGenerationRequestMessage(**given)


def _joined(stop: list[str] | None, more: list[str]) -> list[str]:
    return list(dict.fromkeys([*(stop or ()), *more]))
