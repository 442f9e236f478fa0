"""Directories like those of models with eyes, without weights: a tiny tokenizer, a config, an image processor."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

SPECIAL = ["<|endoftext|>", "<s>", "<|im_start|>", "<|im_end|>"]
CORPUS = ["The quick brown fox jumps over the lazy dog.\n\nWhat is in these images? Red, green and blue."] * 10

PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that takes parts; IMAGE stands for the family's own mark."""

TEXTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that takes texts only."""


@dataclass(frozen=True)
class Family:
    """What the files of one family of models say."""

    model_type: str
    processor_class: str
    image_processor: dict[str, Any]
    image_token: str = "<image>"
    named: dict[str, str] = field(default_factory=dict)
    """Named special tokens of the tokenizer, beside `image_token`."""
    more: tuple[str, ...] = ()
    """Further special tokens."""
    processor: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    feature_token: str = ""
    """The token of an image's features; "": the image token."""
    mark: str = ""
    """Of an image in a rendered template; "": the image token."""

    @property
    def written(self) -> str:
        return self.mark or self.image_token


_SIDE = {"height": 28, "width": 28}
_CLIP = {"size": {"shortest_edge": 28}, "crop_size": _SIDE}
_QWEN_NAMED = {"video_token": "<|video_pad|>", "vision_bos_token": "<|vision_start|>"}
_QWEN_NAMED |= {"vision_eos_token": "<|vision_end|>"}
_QWEN_SIZE = {"shortest_edge": 784, "longest_edge": 28 * 28 * 24}
_TILES = tuple(f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5))
_IDEFICS = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}
_IDEFICS_NAMED = {"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"}


def _qwen(model_type: str, name: str, **image_processor: Any) -> Family:
    return Family(
        model_type,
        name,
        {"image_processor_type": "Qwen2VLImageProcessor", "size": _QWEN_SIZE} | image_processor,
        "<|image_pad|>",
        _QWEN_NAMED,
        mark="<|vision_start|><|image_pad|><|vision_end|>",
    )


FAMILIES = {
    "llava": Family(
        "llava",
        "LlavaProcessor",
        {"image_processor_type": "CLIPImageProcessor"} | _CLIP,
        processor={"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_next": Family(
        "llava_next",
        "LlavaNextProcessor",
        {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}
        | _CLIP,
        processor={"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "idefics3": Family(
        "idefics3",
        "Idefics3Processor",
        {"image_processor_type": "Idefics3ImageProcessor"} | _IDEFICS,
        named=_IDEFICS_NAMED,
        more=("<end_of_utterance>", *_TILES),
        processor={"image_seq_len": 4},
    ),
    "smolvlm": Family(
        "smolvlm",
        "SmolVLMProcessor",
        {"image_processor_type": "SmolVLMImageProcessor"} | _IDEFICS,
        named=_IDEFICS_NAMED | {"video_token": "<video>"},
        more=("<end_of_utterance>", *_TILES),
        processor={"image_seq_len": 4},
    ),
    "internvl": Family(
        "internvl",
        "InternVLProcessor",
        {"image_processor_type": "GotOcr2ImageProcessor", "size": _SIDE, "max_patches": 6},
        "<IMG_CONTEXT>",
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        processor={"image_seq_length": 4},
    ),
    "qwen2_vl": _qwen("qwen2_vl", "Qwen2VLProcessor"),
    "qwen2_5_vl": _qwen("qwen2_5_vl", "Qwen2_5_VLProcessor"),
    "qwen3_vl": _qwen("qwen3_vl", "Qwen3VLProcessor", patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3),
    "glm4v": Family(
        "glm4v",
        "Glm4vProcessor",
        {"image_processor_type": "Glm4vImageProcessor", "size": {"shortest_edge": 1568, "longest_edge": 28 * 28 * 48}},
        "<|image|>",
        {"video_token": "<|video|>"},
        ("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
        mark="<|begin_of_image|><|image|><|end_of_image|>",
    ),
    "glm46v": Family(
        "glm46v",
        "Glm46VProcessor",
        {"image_processor_type": "Glm46VImageProcessor", "size": {"shortest_edge": 1568, "longest_edge": 28 * 28 * 48}},
        "<|image|>",
        {"video_token": "<|video|>"},
        ("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
        mark="<|begin_of_image|><|image|><|end_of_image|>",
    ),
    "paddleocr_vl": Family(
        "paddleocr_vl",
        "PaddleOCRVLProcessor",
        {"image_processor_type": "PaddleOCRVLImageProcessor", "size": {"shortest_edge": 784, "longest_edge": 18816}},
        "<|IMAGE_PLACEHOLDER|>",
    ),
    "aya_vision": Family(
        "aya_vision",
        "AyaVisionProcessor",
        {"image_processor_type": "GotOcr2ImageProcessor", "size": _SIDE, "max_patches": 6},
        "<image>",
        {},
        ("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL"),
        processor={"patch_size": 7, "img_size": 28, "downsample_factor": 2},
        feature_token="<|IMG_PATCH|>",
    ),
    "gemma3": Family(
        "gemma3",
        "Gemma3Processor",
        {"image_processor_type": "Gemma3ImageProcessor", "size": _SIDE},
        "<image_soft_token>",
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        processor={"image_seq_length": 4},
        mark="<start_of_image>",
    ),
    "gemma4": Family(
        "gemma4",
        "Gemma4Processor",
        {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70, "patch_size": 4},
        "<|image|>",
        {"boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>"}
        | {"boa_token": "<|audio>", "eoa_token": "<audio|>"},
        ("<|video|>",),
    ),
    "paligemma": Family(
        "paligemma",
        "PaliGemmaProcessor",
        {"image_processor_type": "SiglipImageProcessor", "size": _SIDE, "image_seq_length": 4},
    ),
    "pixtral": Family(
        "llava",
        "PixtralProcessor",
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 96}, "patch_size": 16},
        "[IMG]",
        more=("[IMG_BREAK]", "[IMG_END]"),
        processor={"patch_size": 16},
    ),
    "mistral3": Family(
        "mistral3",
        "PixtralProcessor",
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 112}, "patch_size": 14},
        "[IMG]",
        more=("[IMG_BREAK]", "[IMG_END]"),
        processor={"patch_size": 14, "spatial_merge_size": 2},
    ),
}


def backend(family: Family) -> Backend:
    """A tokenizer of bytes and a few words."""
    made = Backend(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = [*SPECIAL, family.image_token, *family.named.values(), *family.more]
    trainer = trainers.BpeTrainer(
        vocab_size=340 + len(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in dict.fromkeys(special)])
    return made


def write(path: Path, name: str, template: str | None = PARTS, config: dict[str, Any] | None = None) -> Path:
    """Writes the directory of a family's model and returns it. `config` is the model's own, if it has weights."""
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[name]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend(family),
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={"image_token": family.image_token} | family.named,
        chat_template=None if template is None else template.replace("IMAGE", family.written),
    )
    tokenizer.save_pretrained(path)
    token_id = tokenizer.convert_tokens_to_ids(family.feature_token or family.image_token)
    ids = {"image_token_id": token_id, "image_token_index": token_id}
    found = config or {"model_type": family.model_type} | ids | family.config
    (path / "config.json").write_text(json.dumps(found))
    processor = family.image_processor | {"processor_class": family.processor_class}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    (path / "processor_config.json").write_text(
        json.dumps(family.processor | {"processor_class": family.processor_class})
    )
    return path


def reference(path: Path, name: str) -> Any:
    """transformers' own processor of the directory, whole: made of its parts, without a class for videos."""
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.processing_utils import ProcessorMixin

    class_name = FAMILIES[name].processor_class
    if class_name == "PixtralProcessor":
        found = _pixtral().PixtralProcessor
    else:
        found = getattr(transformers, class_name)
        owner: Any = importlib.import_module(found.__module__)
        if getattr(owner, "num2words", 0) is None:
            owner.num2words = str
    made: Any = type(class_name, (found,), {"check_argument_for_proper_class": lambda *_: None})
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(path, backend="pil"),
        "tokenizer": AutoTokenizer.from_pretrained(path),
    }
    known, _ = ProcessorMixin.get_processor_dict(path)
    return made.from_args_and_dict([parts.get(part) for part in made.get_attributes()], known)


def _pixtral() -> ModuleType:
    """The module as it is in its file: transformers hides it where torchvision is not installed."""
    import transformers

    place = Path(transformers.__file__).parent / "models/pixtral/processing_pixtral.py"
    name = "transformers.models.pixtral.processing_pixtral_itself"
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # It imports one function that only guesses numbers of tokens, from a file that needs torchvision.
    guess = ModuleType("guess")
    guess.get_resize_output_image_size = None  # type: ignore[attr-defined]
    sys.modules[name] = module
    with mock.patch.dict(sys.modules, {"transformers.models.pixtral.image_processing_pixtral": guess}):
        spec.loader.exec_module(module)
    return module
