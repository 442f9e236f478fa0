"""The model's own image processor, as transformers has it, without torch.

It gives the arrays that the model's `get_image_features` takes, under the names of its parameters, and the text that
stands for one image in a prompt. Knows transformers' processor classes; knows no file format.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from api_server.media.decode import ImageRefused
from api_server.media.video_processors import FORMS, VideoProcessor
from shared.json_files import read_json_file
from shared.tokenizer_files import load_tokenizer

# Tokens of an image that is asked for with `detail: low`.
LOW_DETAIL_TOKENS = 256
# Masks that change nothing where each of their elements is true, as in a call with one image.
_MASKS = ("pixel_attention_mask", "pixel_mask")
# Counts that a processor makes its text of, and that no model takes.
_COUNTS = ("rows", "cols", "num_patches")
_TEMPORAL = ("Glm4v", "Glm46V")
# Parts of processors for other media than images, which do without.
_OTHER_MEDIA = ("video_processor", "feature_extractor")
# The numbers of tokens of an image that Gemma 4 may have.
_SOFT_TOKENS = (70, 140, 280, 560, 1120)
# Tokens that chat templates write around an image, and whose models were trained with them.
_AROUND = (("<|vision_start|>", "<|vision_end|>"), ("<|begin_of_image|>", "<|end_of_image|>"))
_AROUND_VIDEOS = (("<|vision_start|>", "<|vision_end|>"), ("<|begin_of_video|>", "<|end_of_video|>"))


class NoProcessor(ValueError):
    """The model's images cannot be processed here. The message says why."""


@dataclass(frozen=True)
class Vision:
    """Facts of an image processor that a prompt is made with."""

    # Stands for an image in a rendered template.
    placeholder: str
    # The placeholder with the tokens that a template of such a model writes around it.
    mark: str
    # The token of the positions that an image's features take, and its text.
    token_id: int
    token: str
    # Text that the processor puts behind the last image and behind the prompt.
    behind_images: str
    behind_prompt: str
    # Changes whenever arrays of an image may change.
    fingerprint: str
    # As above, for videos. "": the model takes none, and `no_videos` says why.
    video_placeholder: str = ""
    video_mark: str = ""
    video_token_id: int = -1
    video_token: str = ""
    no_videos: str = ""
    # The model hears: all that is above holds for sounds, and it takes no images.
    is_sound: bool = False
    # Bytes of the arrays of the longest sound.
    most_sound_bytes: int = 0


@dataclass(frozen=True)
class Arrays:
    """One processed image: `arrays` by name, and the text that stands for the image."""

    arrays: dict[str, NDArray[Any]]
    run: str


class Processor:
    """Processes one image after the other: one call for several would hold all of them in memory at once."""

    def __init__(self, model: str, most_tokens: int, most_video_tokens: int = 0) -> None:
        """Loads the processor. Raises NoProcessor."""
        self._most_tokens = most_tokens
        self.videos: VideoProcessor | None = None
        try:
            self._processor = _load(model)
            self._read(model, most_video_tokens or most_tokens)
        except NoProcessor:
            raise
        except Exception as error:  # files of a model raise whatever comes
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            raise NoProcessor(f"its image processor cannot be loaded without torchvision: {reason}") from error

    def _read(self, model: str, most_video_tokens: int) -> None:
        """Reads the facts of the loaded processor."""
        self.facts = _facts(self._processor, f"{model}\0{self._most_tokens}")
        reason = _why_no_videos(self._processor)
        if reason:
            self.facts = replace(self.facts, no_videos=reason)
        else:
            self.videos = VideoProcessor(self._processor, _video_settings(model), most_video_tokens)
            self.facts = _with_videos(self.facts, self._processor, self.videos)

    def process(self, image: Image.Image, detail: str, pixels: dict[str, int]) -> Arrays:
        """Processes an image in RGB; `pixels` may have min_pixels and max_pixels. Raises ImageRefused."""
        options = self._options(detail, pixels)
        given = self._processor._merge_kwargs(
            tokenizer_init_kwargs=self._processor.tokenizer.init_kwargs, return_tensors="np", **options
        )["images_kwargs"]
        try:
            found, runs = self._processor._process_images([image], **given)
        except ValueError as error:
            raise ImageRefused(f"cannot be used by this model: {error}") from None
        unused = {*self._processor.unused_input_names, *_COUNTS}
        arrays = {name: np.asarray(value) for name, value in found.items() if name not in unused}
        arrays = {name: array for name, array in arrays.items() if not (name in _MASKS and array.all())}
        return Arrays(arrays, runs[0])

    def _options(self, detail: str, pixels: dict[str, int]) -> dict[str, Any]:
        """Arguments of the image processor that keep an image within its tokens."""
        most = self._most_tokens if detail != "original" else 0
        if detail == "low":
            most = min(most or LOW_DETAIL_TOKENS, LOW_DETAIL_TOKENS)
        return _limited(self._processor, most, pixels)


def _limited(processor: Any, most: int, pixels: dict[str, int]) -> dict[str, Any]:
    images = processor.image_processor
    size = dict(getattr(images, "size", None) or {})
    if hasattr(images, "merge_size") and "longest_edge" in size:
        return _area(images, size, most, pixels)
    if pixels:
        raise ImageRefused("cannot be resized by min_pixels and max_pixels: the model has fixed sizes")
    if not most:
        return {}
    if hasattr(images, "max_soft_tokens"):
        fitting = [count for count in _SOFT_TOKENS if count <= min(most, images.max_soft_tokens)]
        return {"max_soft_tokens": max(fitting, default=_SOFT_TOKENS[0])}
    each = getattr(processor, "image_seq_len", None) or getattr(processor, "image_seq_length", None) or 0
    if each and getattr(images, "do_image_splitting", False):
        side = dict(images.max_image_size)["longest_edge"]
        tiles = max(1, math.isqrt(max(1, most // each - 1)))
        return {"size": {"longest_edge": min(size["longest_edge"], tiles * side)}}
    if each and hasattr(images, "max_patches"):
        return {"max_patches": min(images.max_patches, max(1, most // each - 1))}
    if isinstance(processor, _Rows):
        return {"size": {"longest_edge": min(size["longest_edge"], math.isqrt(most) * processor.unit)}}
    return {}


def _area(images: Any, size: dict[str, int], most: int, pixels: dict[str, int]) -> dict[str, Any]:
    """The least and most pixels of an image that keeps its own size."""
    unit = (images.patch_size * images.merge_size) ** 2
    if type(images).__name__.startswith(_TEMPORAL):
        unit *= images.temporal_patch_size  # these count the pixels of an image once for each frame of a pair
    longest = min(size["longest_edge"], most * unit) if most else size["longest_edge"]
    longest = min(longest, pixels.get("max_pixels", longest))
    longest = max(longest, unit)
    shortest = min(pixels.get("min_pixels", size["shortest_edge"]), longest)
    if (shortest, longest) == (size["shortest_edge"], size["longest_edge"]):
        return {}
    return {"size": {"shortest_edge": shortest, "longest_edge": longest}}


def _load(model: str) -> Any:
    from transformers import AutoConfig, AutoImageProcessor
    from transformers.models.auto import processing_auto
    from transformers.processing_utils import ProcessorMixin

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    images = AutoImageProcessor.from_pretrained(model, backend="pil", trust_remote_code=False)
    tokenizer = load_tokenizer(model)
    known, _ = ProcessorMixin.get_processor_dict(model)
    usual: dict[str, Any] = getattr(processing_auto, "PROCESSOR_MAPPING_NAMES", {})
    # The files of a model may name another class than that of its type.
    name = known.get("processor_class") or images._processor_class or usual.get(config.model_type)
    if isinstance(name, tuple):
        name = name[-1]
    if name is None:
        raise NoProcessor(f"models of type {config.model_type} have no processor")
    if name == "PixtralProcessor":
        made = _Rows(images, tokenizer, known)
    else:
        made = _constructed(_class(name), images, tokenizer, known)
    found = getattr(config, "image_token_id", None)
    made.feature_token_id = getattr(config, "image_token_index", None) if found is None else found
    return made


def _class(name: str) -> Any:
    """The processor's class, which takes the parts that there are."""
    import transformers

    found = getattr(transformers, name)
    owner = importlib.import_module(found.__module__)
    if getattr(owner, "num2words", 0) is None:
        owner.num2words = str  # type: ignore[attr-defined]  # the package writes numbers in texts about videos

    # transformers checks the classes of all parts, those of videos among them, which cannot be imported here.
    return type(found.__name__, (found,), {"check_argument_for_proper_class": lambda *_: None})


def _constructed(made: Any, images: Any, tokenizer: Any, known: dict[str, Any]) -> Any:
    parts = {"image_processor": images, "tokenizer": tokenizer}
    unknown = [part for part in made.get_attributes() if part not in (*parts, *_OTHER_MEDIA)]
    if unknown:
        raise NoProcessor(f"it needs {' and '.join(unknown)}")
    return made.from_args_and_dict([parts.get(part) for part in made.get_attributes()], known)


class _Rows:
    """Pixtral's processor, whose class in transformers wants torch: rows of tokens, each with an end."""

    unused_input_names: tuple[str, ...] = ()
    feature_token_id: int | None = None

    def __init__(self, images: Any, tokenizer: Any, known: dict[str, Any]) -> None:
        self.image_processor = images
        self.tokenizer = tokenizer
        self.unit = int(known.get("patch_size", 16)) * int(known.get("spatial_merge_size", 1))
        self.image_token = str(known.get("image_token", "[IMG]"))
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self._break = str(known.get("image_break_token", "[IMG_BREAK]"))
        self._end = str(known.get("image_end_token", "[IMG_END]"))

    def _merge_kwargs(self, tokenizer_init_kwargs: Any, **given: Any) -> dict[str, Any]:
        return {"images_kwargs": given}

    def _process_images(self, images: list[Any], **given: Any) -> tuple[Any, list[str]]:
        found = self.image_processor(images, **given | {"patch_size": self.unit})
        runs = []
        for height, width in found["image_sizes"]:
            row = self.image_token * (int(width) // self.unit)
            runs.append(self._break.join([row] * (int(height) // self.unit)) + self._end)
        return found, runs


def _why_no_videos(processor: Any) -> str:
    """Why a model is shown no videos here; "" if it is."""
    if type(processor).__name__ not in FORMS:
        return "videos are not supported for this type of model"
    if type(processor).__name__ == "SmolVLMProcessor" and importlib.util.find_spec("num2words") is None:
        return "its texts about videos need the package num2words: install tokenyard[video]"
    if _has_video_token(processor) and processor.video_token_id in (None, processor.tokenizer.unk_token_id):
        return f"its tokenizer has no token {processor.video_token}"
    return ""


def _has_video_token(processor: Any) -> bool:
    """Whether the features of videos have a token of their own. Other models give them the token of images."""
    name = type(processor).__name__
    return FORMS[name].is_video and name != "Glm4vProcessor"


def _video_settings(model: str) -> dict[str, Any]:
    """Settings for videos in the files of a model, of which the newer forms come first."""
    from transformers.utils.hub import cached_file

    for name in ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json"):
        path = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
        if path is None:
            continue
        try:
            found = read_json_file(Path(path))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        if not isinstance(found, dict):
            raise ValueError(f"{path} must hold an object, not {type(found).__name__}")
        if name != "processor_config.json":
            return found
        if isinstance(found.get("video_processor"), dict):
            return dict(found["video_processor"])
    return {}


def _with_videos(facts: Vision, processor: Any, videos: VideoProcessor) -> Vision:
    placeholder = processor.video_token
    token_id = int(processor.video_token_id) if _has_video_token(processor) else facts.token_id
    settings = facts.fingerprint + videos.fingerprint
    return replace(
        facts,
        video_placeholder=placeholder,
        video_mark=_marked(placeholder, processor.tokenizer.get_vocab(), _AROUND_VIDEOS),
        video_token_id=token_id,
        video_token=str(processor.tokenizer.convert_ids_to_tokens(token_id)),
        fingerprint=hashlib.blake2b(settings.encode(), digest_size=16).hexdigest(),
    )


def _marked(placeholder: str, vocabulary: dict[str, int], around: tuple[tuple[str, str], ...] = _AROUND) -> str:
    for before, behind in around:
        if before in vocabulary and behind in vocabulary:
            return f"{before}{placeholder}{behind}"
    return placeholder


def _facts(processor: Any, model: str) -> Vision:
    tokenizer = processor.tokenizer
    token_id = processor.feature_token_id
    if token_id is None:
        token_id = processor.image_token_ids[0]
    placeholder = processor.image_token
    if not placeholder or token_id is None or token_id < 0:
        raise NoProcessor("it names no token for images")
    is_first = type(processor).__name__ == "PaliGemmaProcessor"
    settings = f"{model}\0{processor.image_processor.to_json_string()}\0{type(processor).__name__}"
    return Vision(
        placeholder=placeholder,
        mark=_marked(placeholder, tokenizer.get_vocab()),
        token_id=int(token_id),
        token=str(tokenizer.convert_ids_to_tokens(int(token_id))),
        # PaliGemma was trained with images first, then the beginning, the text and a newline.
        behind_images=tokenizer.bos_token or "" if is_first else "",
        behind_prompt="\n" if is_first else "",
        fingerprint=hashlib.blake2b(settings.encode(), digest_size=16).hexdigest(),
    )
