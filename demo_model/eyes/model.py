"""The embedded model as a whole: the demo decoder, a SigLIP tower and a projector, in transformers' LLaVA class.

Knows the sizes, and how to read and write the folder. Does not know training.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from demo_model.train_tokenizer import IMAGE_TOKEN

SIDE = 48
PATCH = 8
# Tokens that stand for a picture.
TOKENS = (SIDE // PATCH) ** 2
# What the processor makes of a channel's 0 to 255.
MEAN = 0.5
DEVIATION = 0.5


def tower_config() -> SiglipVisionConfig:
    """A small tower. The head that pools is left out: the decoder sees every patch."""
    return SiglipVisionConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        vision_use_head=False,
    )


def new_model(text: LlamaForCausalLM, image_token_id: int) -> LlavaForConditionalGeneration:
    """A model with the decoder's weights and a tower that has learned nothing."""
    config = LlavaConfig(
        vision_config=tower_config(),
        text_config=text.config,
        image_token_index=image_token_id,
        image_seq_length=TOKENS,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    model: Any = LlavaForConditionalGeneration(config).float()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    model.generation_config = text.generation_config
    whole: LlavaForConditionalGeneration = model
    return whole


def pixels(images: Sequence[Image.Image]) -> torch.Tensor:
    """Pictures in RGB as the processor makes them: f32 [n, 3, SIDE, SIDE]."""
    sized = [image.resize((SIDE, SIDE), Image.Resampling.BICUBIC) for image in images]
    stacked = np.stack([np.asarray(image) for image in sized]).transpose(0, 3, 1, 2)
    return torch.from_numpy(stacked / np.float32(255 * DEVIATION) - np.float32(MEAN / DEVIATION))


def processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    images = SiglipImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, image_mean=[MEAN] * 3, image_std=[DEVIATION] * 3
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        image_token=IMAGE_TOKEN,
        chat_template=tokenizer.chat_template,
    )


def save(model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the weights in bfloat16, and the processor's file. The tokenizer's files are there."""
    shipped: Any = copy.deepcopy(model)
    shipped.to(torch.bfloat16)
    shipped.config.text_config.name_or_path = ""
    shipped.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    processor(tokenizer).to_json_file(folder / "processor_config.json")
