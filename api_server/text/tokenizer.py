"""The model's tokenizer: turns prompts into token ids, in threads, and knows the tokens' properties.

Knows transformers' tokenizers (with torch hidden), generation_config.json and the vocabulary; knows no dialect and no
scheduler.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from api_server.body.item_limits import MAX_TEXT
from api_server.chat import template
from api_server.chat.control_tokens import ControlTokens
from api_server.chat.control_tokens import parts as split_at_names
from api_server.errors import RETRY_AFTER_SECONDS, ErrorKind, RequestFailed, invalid
from api_server.media.images import Images
from api_server.media.processors import Vision
from api_server.text.detokenizer import Detokenizer, Vocabulary
from api_server.text.image_prompt import Pictures, PlacedImage
from api_server.text.model_files import defaults, eos_ids, processor_template, read_generation_config
from interfaces import TextGenerationRequest
from shared.resources import usable_cores
from shared.tokenizer_files import load_tokenizer

log = logging.getLogger("tokenyard")

T = TypeVar("T")

# Prompts that may wait for a tokenizer thread; further requests are refused instead of queued without end.
MAX_JOBS = 512
THREADS = 4


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt as token ids. `text` is None when the client sent token ids."""

    text: str | None
    tokens: NDArray[np.int32]
    # Parts of the text that were tokenized one by one, if there are several (control_tokens.py).
    parts: tuple[str, ...] = ()
    images: tuple[PlacedImage, ...] = ()
    # The tokens of the positions that features of images and videos take.
    vision_token_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class TokenSpan:
    """One token of a text: `start` and `stop` are character offsets into it."""

    id: int
    text: str
    start: int
    stop: int


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads: it is never changed after loading."""

    def __init__(self, tokenizer: Any, generation_config: dict[str, Any], control_tokens: bool = False) -> None:
        """Wraps a tokenizer. With `control_tokens`, their names act as control tokens in messages, too."""
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # Truncation and padding are state of the backend, which several threads read at once.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._vocabulary = Vocabulary(self._backend)
        self._pool = ThreadPoolExecutor(min(THREADS, usable_cores()), "tokenizer")
        self._jobs = 0
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        # One more than the highest id.
        self.vocab_size = max(vocabulary.values()) + 1
        self.eos_token_ids = eos_ids(tokenizer, generation_config, self.vocab_size)
        self.defaults = defaults(generation_config, self.eos_token_ids)
        self._longest_token = max(map(len, vocabulary))
        self._control = None if control_tokens else ControlTokens(self._backend, self.chat_template)
        # Gives the images of requests, or None while the served model has no eyes.
        self.images: Callable[[], Images | None] = lambda: None
        self._image_forms: dict[str, template.ImageForm] = {}

    @classmethod
    def load(cls, model: str, control_tokens: bool = False) -> Tokenizer:
        """Loads from a Hugging Face directory or hub name, or a GGUF file. Raises ValueError with the reason."""
        tokenizer = load_tokenizer(model)
        if not tokenizer.chat_template:
            tokenizer.chat_template = processor_template(model)
        return cls(tokenizer, read_generation_config(model), control_tokens)

    async def prompt(self, request: TextGenerationRequest, max_tokens: int | None) -> Prompt:
        """The request's prompt as token ids. Raises RequestFailed.

        With `max_tokens` a text that is too long by any reckoning is refused without tokenizing it. Without it, and
        when the prompt will be truncated, the limit is MAX_TEXT.
        """
        if request.prompt is None and not request.messages:
            raise invalid("exactly one of prompt and messages must be given", "prompt")
        pictures = await self.pictures(request)
        if isinstance(request.prompt, Sequence) and not isinstance(request.prompt, str):
            return self._ids_prompt(request.prompt, request, pictures)
        return await self.in_thread(lambda: self._encode_prompt(request, max_tokens, pictures))

    async def spans(self, text: str, add_special_tokens: bool = True, parts: Sequence[str] = ()) -> list[TokenSpan]:
        """The tokens of a text with their places in it (TGI's /tokenize). Raises RequestFailed when it is too long.

        `parts` of the text, if given, are tokenized one by one.
        """
        refuse_long(len(text), "inputs")
        return await self.in_thread(lambda: self._spans(text, parts or [text], add_special_tokens))

    async def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids. Raises RequestFailed for ids outside the vocabulary."""
        ids = self._checked(tokens).tolist()
        return await self.in_thread(lambda: str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens)))

    def detokenizer(self, context: Sequence[int], skip_special_tokens: bool, kept: Collection[int] = ()) -> Detokenizer:
        """A detokenizer for the continuation of `context`; the special tokens in `kept` are not skipped."""
        return self._vocabulary.detokenizer(context, skip_special_tokens, kept)

    @property
    def added(self) -> frozenset[int]:
        """Tokens that no text is cut into: marks of turns, of calls and the like."""
        return self._vocabulary.added

    def token_of(self, text: str) -> int | None:
        """The id of the token that is this text, if there is one."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def ids_of(self, text: str) -> list[int]:
        """The tokens of a short text that a template or a parser has written."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    @property
    def chat_template(self) -> str:
        """The text of the chat template; all of them if there are several; empty if there is none."""
        found = getattr(self._tokenizer, "chat_template", None) or ""
        return "\n".join(found.values()) if isinstance(found, dict) else str(found)

    def is_special(self, token: int) -> bool:
        return token in self._vocabulary.special

    def token_text(self, token: int) -> str:
        """The text of a token by itself."""
        return str(self._backend.decode([token], skip_special_tokens=False))

    def piece(self, token: int) -> str:
        """The text of a token inside a text, the same at every place."""
        return self._vocabulary.piece(token)

    def raw(self, token: int) -> bytes:
        """The bytes of a token."""
        return self._vocabulary.raw(token)

    async def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text that each token adds to the text of all of them, special ones included."""
        return await self.in_thread(lambda: list(map(self.detokenizer([], False).add, tokens)))

    def exact(self, text: str) -> list[int]:
        """The tokens of a text: special tokens that it names become those tokens, and none is added."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def grammar_vocabulary(self) -> tuple[str, list[int]]:
        """The vocabulary for a grammar matcher: the tokenizer as JSON, and the tokens that end a text."""
        return str(self._backend.to_str()), self.eos_token_ids

    @property
    def backend(self) -> Any:
        """The tokenizer of the tokenizers library. It must not be changed."""
        return self._backend

    @property
    def has_token_types(self) -> bool:
        """True when the model wants to know the two halves of a pair apart."""
        return "token_type_ids" in self._tokenizer.model_input_names

    def guarded(self, form: Callable[..., str], *texts: str | None) -> list[str]:
        """The text that `form` makes of clients' texts, in parts to be tokenized one by one.

        Control tokens that the clients' texts name stay text.
        """
        if self._control is None:
            return [form(*texts)]
        turns, _, sign = self._control.guarded([{"role": "user", "content": text} for text in texts], None)
        return split_at_names(form(*(turn["content"] for turn in turns)), sign)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, job: Callable[[], T]) -> T:
        """Runs tokenization in a thread. Raises RequestFailed(OVERLOADED) when too much waits for one."""
        if self._jobs >= MAX_JOBS:
            raise RequestFailed(
                ErrorKind.OVERLOADED,
                f"{self._jobs} prompts wait to be tokenized; retry later",
                retry_after=RETRY_AFTER_SECONDS,
            )
        self._jobs += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, job)
        finally:
            self._jobs -= 1

    async def pictures(self, request: TextGenerationRequest) -> Pictures | None:
        """The images, or the sounds, of a request. None for a model without eyes and ears. Raises RequestFailed."""
        field = "messages" if request.messages else "prompt"
        images = self.images()
        if images is not None and request.prompt_embeddings is None:
            try:
                vision = await images.vision()
            except RequestFailed:
                if request.images or request.videos or request.sounds:
                    raise
                return None  # a text needs no processor of media
            processed = await images.processed(request.images, request.image_wishes) if request.images else []
            processed += await images.processed_videos(request.videos, request.video_wishes) if request.videos else []
            processed += await images.processed_sounds(request.sounds, request.sound_fields) if request.sounds else []
            return Pictures(vision, processed, field)
        if request.images or request.videos or request.sounds:
            what = "images" if request.images else "videos" if request.videos else "sounds"
            raise RequestFailed(ErrorKind.UNSUPPORTED, f"this model takes no {what}, only text", field=field)
        return None

    def _ids_prompt(self, given: Sequence[int], request: TextGenerationRequest, pictures: Pictures | None) -> Prompt:
        ids = self._checked(given)
        if pictures is None:
            return Prompt(None, _truncated(ids, request))
        pictures = pictures.arranged_ids(ids, self.token_of)
        return self._with_images(None, pictures.expanded_ids(ids, self.token_of, self.ids_of), (), request, pictures)

    def _image_form(self, vision: Vision) -> template.ImageForm:
        known = self._image_forms.get(vision.mark)
        if known is None:
            video = (vision.video_placeholder, vision.video_mark)
            image = (vision.placeholder, vision.mark)
            known = template.image_form(self._tokenizer, image, video, "audio" if vision.is_sound else "image")
            self._image_forms[vision.mark] = known
        return known

    def _with_images(
        self,
        text: str | None,
        ids: NDArray[np.int32],
        parts: tuple[str, ...],
        request: TextGenerationRequest,
        pictures: Pictures,
    ) -> Prompt:
        """The prompt with its images at their places."""
        placed = pictures.placed(ids)
        if placed and request.truncate_prompt_to is not None and len(ids) > request.truncate_prompt_to:
            raise invalid(
                f"the prompt has {len(ids)} tokens, more than the {request.truncate_prompt_to} that it is to be cut "
                "to, and a prompt with media cannot be cut: send a shorter one",
                "truncate",
            )
        return Prompt(text, _truncated(ids, request), parts, placed, pictures.token_ids if placed else ())

    def _encode_prompt(
        self, request: TextGenerationRequest, max_tokens: int | None, pictures: Pictures | None = None
    ) -> Prompt:
        if request.messages:
            self._refuse_endless_turns(request, max_tokens)
            form = self._text_form if pictures is None else self._image_form(pictures.vision)
            parts = template.render(self._tokenizer, request, self._control, form)
        else:
            parts = [str(request.prompt)]
        if not parts[-1].rstrip().endswith(request.opening.rstrip()):
            parts[-1] += request.opening
        text = "".join(parts)
        add_special_tokens = request.add_special_tokens
        if add_special_tokens is None:
            add_special_tokens = not request.messages
        if max_tokens is not None and request.truncate_prompt_to is None:
            self._refuse_endless(text, max_tokens)
        else:
            refuse_long(len(text), "prompt")
        if pictures is not None:
            pictures = pictures.arranged(parts)
            parts = pictures.expanded(parts)
            text = "".join(parts)
            add_special_tokens = add_special_tokens and not (pictures.images and pictures.vision.behind_images)
        ids = np.array(self._encoded(parts, add_special_tokens).ids, np.int32)
        several = tuple(parts) if len(parts) > 1 else ()
        if pictures is not None:
            return self._with_images(text, ids, several, request, pictures)
        return Prompt(text, _truncated(ids, request), several)

    def _encoded(self, parts: Sequence[str], add_special_tokens: bool) -> Any:
        """The encoding of a text whose parts no token crosses, as `tokenizers` returns it."""
        if len(parts) == 1:
            return self._backend.encode(parts[0], add_special_tokens=add_special_tokens)
        first, *others = parts
        encodings = [self._backend.encode(first, add_special_tokens=False)]
        encodings += [self._inner.encode(part, add_special_tokens=False) for part in others]
        merged = type(encodings[0]).merge(encodings, growing_offsets=True)
        return self._backend.post_process(merged, add_special_tokens=add_special_tokens)

    @cached_property
    def _text_form(self) -> template.ImageForm | None:
        return template.text_form(self._tokenizer)

    @cached_property
    def _inner(self) -> Any:
        """The tokenizer backend for text after the beginning, without the space that some put first."""
        form = json.loads(self._backend.to_str())
        unspaced = _without_first_space(form)
        return self._backend if unspaced == form else type(self._backend).from_str(json.dumps(unspaced))

    def _refuse_endless_turns(self, request: TextGenerationRequest, max_tokens: int | None) -> None:
        """Refuses messages that are too long before a template is rendered: rendering takes time for every character.

        A template may leave out a part of what it is given, so this limit is generous where the context is small.
        """
        most = max(MAX_TEXT, (max_tokens or 0) * self._longest_token)
        characters = template.size(request)
        if characters > most:
            raise RequestFailed(
                ErrorKind.TOO_LONG,
                f"the messages and tools have {characters} characters; at most {most} are possible: send fewer",
                field="messages",
            )

    def _refuse_endless(self, text: str, max_tokens: int) -> None:
        fewest = len(text) // self._longest_token
        if fewest > max_tokens:
            raise RequestFailed(
                ErrorKind.TOO_LONG,
                f"the prompt has at least {fewest} tokens ({len(text)} characters); "
                f"this model's context holds {max_tokens} tokens, the answer's included",
                field="prompt",
                numbers={"prompt_tokens": fewest, "limit": max_tokens},
            )

    def _checked(self, tokens: Sequence[int]) -> NDArray[np.int32]:
        """Client-sent ids as an array."""
        self.check_ids(tokens, "prompt")
        return np.array(tokens, np.int32)

    def check_ids(self, tokens: Sequence[int], field: str) -> None:
        """Raises RequestFailed(INVALID) for ids outside the vocabulary: they would read outside the embedding."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            bad = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise invalid(f"{field} contains token id {bad}; ids are 0 to {self.vocab_size - 1}", field)

    def _spans(self, text: str, parts: Sequence[str], add_special_tokens: bool) -> list[TokenSpan]:
        encoding = self._encoded(parts, add_special_tokens)
        return [
            TokenSpan(token, text[start:stop] or self.token_text(token), start, stop)
            for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
        ]


def _without_first_space(form: Any) -> Any:
    """A tokenizer's JSON without the parts that put a space before a text."""
    if isinstance(form, list):
        return [_without_first_space(part) for part in form if not _is_prepend(part)]
    if not isinstance(form, dict):
        return form
    steps = ("normalizer", "pre_tokenizer", "normalizers", "pretokenizers")
    found = {
        name: None if _is_prepend(part) else _without_first_space(part) if name in steps else part
        for name, part in form.items()
    }
    changes = {"add_prefix_space": False, "prepend_scheme": "never"}
    return found | {name: value for name, value in changes.items() if name in found}


def _is_prepend(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "Prepend"


def refuse_long(characters: int, field: str) -> None:
    """Raises RequestFailed(TOO_LONG) for more text than is tokenized at once."""
    if characters > MAX_TEXT:
        message = f"{field} has {characters} characters; at most {MAX_TEXT} are tokenized at once, so send it in parts"
        raise RequestFailed(ErrorKind.TOO_LONG, message, field=field)


def _truncated(tokens: NDArray[np.int32], request: TextGenerationRequest) -> NDArray[np.int32]:
    keep = request.truncate_prompt_to
    return tokens if keep is None else tokens[-keep:]
