"""The standard model with eyes: the Llama of `standard_model.py`, and a SigLIP tower of 93 million random weights.

`python -m benchmarks.standard_vision DIR [--size tiny]` writes it as an Idefics 3 model, which transformers and
llama.cpp read, too; the tower sees 512 x 512 pixels, which become 64 tokens. Larger pictures are cut into such tiles.
Speed is all that it is good for.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, Idefics3Config

from benchmarks.standard_model import END, SIZES, SPECIAL, VOCABULARY, random_weights, save_tokenizer

TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
NAMED = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
# llama.cpp puts this token, two newlines, before an image.
NEWLINES = ("ĊĊ",)
SPECIALS = (*SPECIAL, *NAMED.values(), *TILES)
TOWERS: Mapping[str, Mapping[str, int]] = {
    "135m": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 16,
    },
}
# Patches along each side of a token.
MERGED = {"135m": 4, "tiny": 2}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def standard_vision(directory: Path, size: str = "135m") -> Path:
    """Make the model in `directory`, unless it is there already."""
    if not (directory / "preprocessor_config.json").is_file():
        directory.mkdir(parents=True, exist_ok=True)
        _save_weights(directory, size)
        save_tokenizer(directory, SPECIALS, CHAT_TEMPLATE, NAMED, NEWLINES)
        _save_processor(directory, TOWERS[size]["image_size"], MERGED[size])
    return directory


def _save_weights(directory: Path, size: str) -> None:
    text = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **SIZES[size],
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "bos_token_id": SPECIAL.index("<|im_start|>"),
        "eos_token_id": END,
        "pad_token_id": END,
    }
    config = Idefics3Config(
        text_config=text,
        vision_config=dict(TOWERS[size]),
        scale_factor=MERGED[size],
        image_token_id=SPECIALS.index("<image>"),
        tie_word_embeddings=True,
    )
    auto: Any = AutoModelForImageTextToText
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(136)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.copy_(random_weights(name, parameter.shape, generator, len(SPECIALS)))
    model.tie_weights()
    model.generation_config.do_sample = False
    model.save_pretrained(directory)


def _save_processor(directory: Path, side: int, merged: int) -> None:
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "size": {"longest_edge": side},
        "max_image_size": {"longest_edge": side},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    tokens = (side // 16 // merged) ** 2
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    (directory / "processor_config.json").write_text(
        json.dumps({"processor_class": "Idefics3Processor", "image_seq_len": tokens})
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.standard_vision", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=sorted(TOWERS), default="135m")
    options = parser.parse_args()
    print(standard_vision(options.directory, options.size))


if __name__ == "__main__":
    main()
