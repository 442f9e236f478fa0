"""Tiny random models that take images, each with inputs for one image, as an image processor makes them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.model_worker.vision.tiny_parts import (
    BEGIN,
    END,
    GRID_IDS,
    GRID_TOWER,
    HIDDEN,
    IDS,
    IMAGE,
    PINPOINTS,
    TEXT,
    TOWER,
    Draw,
    Tiny,
    grid,
    pixels,
    rope,
)

PATCHES = pixels(24, 96, image_grid_thw=[[1, 4, 6]])


def _llava(**vision: object) -> Any:
    return transformers.LlavaConfig(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=TOWER | {"model_type": "clip_vision_model", "projection_dim": 32} | vision,
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
        **IDS,
    )


def llava() -> Tiny:
    return Tiny(transformers.LlavaForConditionalGeneration(_llava()), pixels(1, 3, 16, 16), 16)


def pixtral_llava() -> Tiny:
    config = transformers.LlavaConfig(
        text_config=TEXT | {"model_type": "mistral", "head_dim": 16},
        vision_config=TOWER | {"model_type": "pixtral", "image_size": 32},
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        **IDS,
    )
    draw = pixels(1, 3, 16, 24, image_sizes=[[16, 24]])
    return Tiny(transformers.LlavaForConditionalGeneration(config), draw, 24)


def vipllava() -> Tiny:
    config = transformers.VipLlavaConfig(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=TOWER | {"model_type": "clip_vision_model", "projection_dim": 32},
        vision_feature_layer=[-2, -1],
        **IDS,
    )
    return Tiny(transformers.VipLlavaForConditionalGeneration(config), pixels(1, 3, 16, 16), 16)


def llava_next() -> Tiny:
    config = transformers.LlavaNextConfig(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=TOWER | {"model_type": "clip_vision_model", "projection_dim": 32},
        image_grid_pinpoints=PINPOINTS,
        **IDS,
    )
    draw = pixels(1, 5, 3, 16, 16, image_sizes=[[32, 32]])
    return Tiny(transformers.LlavaNextForConditionalGeneration(config), draw, 88)


def llava_onevision() -> Tiny:
    config = transformers.LlavaOnevisionConfig(
        text_config=TEXT | {"model_type": "qwen2"},
        vision_config=TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        video_token_index=191,
        image_grid_pinpoints=PINPOINTS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
        **IDS,
    )
    draw = pixels(1, 5, 3, 16, 16, image_sizes=[[32, 32]], batch_num_images=[1])
    return Tiny(transformers.LlavaOnevisionForConditionalGeneration(config), draw, 88)


def mistral3() -> Tiny:
    config = transformers.Mistral3Config(
        text_config=TEXT | {"model_type": "mistral", "head_dim": 16},
        vision_config=TOWER | {"model_type": "pixtral", "image_size": 32},
        spatial_merge_size=2,
        **IDS,
    )
    draw = pixels(1, 3, 16, 24, image_sizes=[[16, 24]])
    return Tiny(transformers.Mistral3ForConditionalGeneration(config), draw, 6)


def internvl() -> Tiny:
    config = transformers.InternVLConfig(
        text_config=TEXT | {"model_type": "qwen2"},
        vision_config=TOWER | {"image_size": [16, 16], "patch_size": [4, 4]},
        downsample_ratio=0.5,
        image_seq_length=4,
        **IDS,
    )
    return Tiny(transformers.InternVLForConditionalGeneration(config), pixels(2, 3, 16, 16), 8)


def _tiles(count: int) -> Draw:
    mask = torch.ones(1, count, 16, 16, dtype=torch.bool)
    return lambda: {"pixel_values": torch.randn(1, count, 3, 16, 16), "pixel_attention_mask": mask}


def idefics2() -> Tiny:
    perceiver = {
        "hidden_size": HIDDEN,
        "resampler_n_latents": 4,
        "resampler_depth": 1,
        "resampler_n_heads": 2,
        "resampler_head_dim": 16,
        "num_key_value_heads": 1,
    }
    config = transformers.Idefics2Config(
        text_config=TEXT | {"model_type": "mistral", "head_dim": 16},
        vision_config=TOWER,
        perceiver_config=perceiver,
        **IDS,
    )
    return Tiny(transformers.Idefics2ForConditionalGeneration(config), _tiles(1), 4, axis=1)


def idefics3() -> Tiny:
    config = transformers.Idefics3Config(
        text_config=TEXT | {"model_type": "llama"}, vision_config=TOWER, scale_factor=2, **IDS
    )
    return Tiny(transformers.Idefics3ForConditionalGeneration(config), _tiles(2), 8, axis=1)


def smolvlm() -> Tiny:
    config = transformers.SmolVLMConfig(
        text_config=TEXT | {"model_type": "llama"}, vision_config=TOWER, scale_factor=2, **IDS
    )
    return Tiny(transformers.SmolVLMForConditionalGeneration(config), _tiles(2), 8, axis=1)


def aria() -> Tiny:
    config = transformers.AriaConfig(
        text_config=TEXT | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        vision_config=TOWER | {"model_type": "idefics3_vision"},
        projector_patch_to_query_dict={16: 4},
        vision_feature_layer=-1,
        **IDS,
    )
    mask = torch.ones(1, 16, 16, dtype=torch.bool)
    model = transformers.AriaForConditionalGeneration(config)
    return Tiny(model, lambda: {"pixel_values": torch.randn(1, 3, 16, 16), "pixel_mask": mask}, 4)


def cohere2_vision() -> Tiny:
    layers = ["sliding_attention", "full_attention"]
    config = transformers.Cohere2VisionConfig(
        text_config=TEXT | {"model_type": "cohere2", "head_dim": 16, "sliding_window": 8, "layer_types": layers},
        vision_config=TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        downsample_factor=2,
        alignment_intermediate_size=64,
        **IDS,
    )
    return Tiny(transformers.Cohere2VisionForConditionalGeneration(config), pixels(1, 3, 16, 16), 4)


def aya_vision() -> Tiny:
    layers = ["sliding_attention", "full_attention"]
    config = transformers.AyaVisionConfig(
        text_config=TEXT | {"model_type": "cohere2", "head_dim": 16, "sliding_window": 8, "layer_types": layers},
        vision_config=TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        downsample_factor=2,
        image_token_index=IMAGE,
        tie_word_embeddings=False,
    )
    return Tiny(transformers.AyaVisionForConditionalGeneration(config), pixels(1, 3, 16, 16), 4)


def paddleocr_vl() -> Tiny:
    config = transformers.PaddleOCRVLConfig(
        text_config=TEXT | {"head_dim": 16} | rope(), vision_config=TOWER | {"spatial_merge_size": 2}, **GRID_IDS
    )
    draw = pixels(24, 3, 4, 4, image_grid_thw=[[1, 4, 6]])
    return grid(draw, transformers.PaddleOCRVLForConditionalGeneration(config))


def qwen2_vl() -> Tiny:
    vision = GRID_TOWER | {"embed_dim": 32, "hidden_size": HIDDEN, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(text_config=TEXT | rope(), vision_config=vision, **GRID_IDS)
    return grid(PATCHES, transformers.Qwen2VLForConditionalGeneration(config))


def qwen2_5_vl() -> Tiny:
    vision = GRID_TOWER | {"window_size": 16, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(text_config=TEXT | rope(), vision_config=vision, **GRID_IDS)
    return grid(PATCHES, transformers.Qwen2_5_VLForConditionalGeneration(config))


DEEP: dict[str, Any] = {"depth": 3, "num_position_embeddings": 64}
DEEP_TOWER = GRID_TOWER | DEEP | {"deepstack_visual_indexes": [0, 1]}


def qwen3_vl() -> Tiny:
    text = TEXT | {"head_dim": 16} | rope(mrope_interleaved=True)
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=DEEP_TOWER, **GRID_IDS)
    return grid(PATCHES, transformers.Qwen3VLForConditionalGeneration(config))


def qwen3_vl_moe() -> Tiny:
    experts = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    text = TEXT | experts | rope(mrope_interleaved=True)
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=DEEP_TOWER, **GRID_IDS)
    return grid(PATCHES, transformers.Qwen3VLMoeForConditionalGeneration(config))


DELTA: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}


def qwen3_5() -> Tiny:
    text = TEXT | DELTA | rope(mrope_interleaved=True)
    config = transformers.Qwen3_5Config(text_config=text, vision_config=GRID_TOWER | DEEP, **GRID_IDS)
    return grid(PATCHES, transformers.Qwen3_5ForConditionalGeneration(config))


def qwen3_5_moe() -> Tiny:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    text = TEXT | DELTA | experts | {"shared_expert_intermediate_size": 32} | rope(mrope_interleaved=True)
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=GRID_TOWER | DEEP, **GRID_IDS)
    return grid(PATCHES, transformers.Qwen3_5MoeForConditionalGeneration(config))


GLM_IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": 191,
    "image_start_token_id": BEGIN,
    "image_end_token_id": END,
    "video_start_token_id": 194,
    "video_end_token_id": 195,
    "tie_word_embeddings": False,
}
GLM_TEXT = TEXT | {"head_dim": 16} | rope(partial_rotary_factor=1.0)


def glm4v() -> Tiny:
    config = transformers.Glm4vConfig(text_config=GLM_TEXT, vision_config=GRID_TOWER | {"image_size": 16}, **GLM_IDS)
    return grid(PATCHES, transformers.Glm4vForConditionalGeneration(config))


def glm46v() -> Tiny:
    config = transformers.Glm46VConfig(text_config=GLM_TEXT, vision_config=GRID_TOWER | {"image_size": 16}, **GLM_IDS)
    return grid(PATCHES, transformers.Glm46VForConditionalGeneration(config))


def glm4v_moe() -> Tiny:
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    }
    config = transformers.Glm4vMoeConfig(
        text_config=GLM_TEXT | experts, vision_config=GRID_TOWER | {"image_size": 16}, **GLM_IDS
    )
    return grid(PATCHES, transformers.Glm4vMoeForConditionalGeneration(config))


def gemma3() -> Tiny:
    layers = ["sliding_attention", "full_attention"]
    text = {"head_dim": 16, "sliding_window": 8, "layer_types": layers, "query_pre_attn_scalar": 16}
    config = transformers.Gemma3Config(
        text_config=TEXT | text,
        vision_config=TOWER | {"image_size": 32},
        mm_tokens_per_image=16,
        boi_token_index=BEGIN,
        eoi_token_index=END,
        **IDS,
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    return Tiny(model, pixels(1, 3, 32, 32), 16, (BEGIN,), (END,))


def _gemma4(**text: object) -> Tiny:
    layers = ["sliding_attention", "full_attention"]
    common = {
        "head_dim": 16,
        "global_head_dim": 16,
        "sliding_window": 8,
        "layer_types": layers,
        "vocab_size_per_layer_input": 200,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 0,
    }
    tower = {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
        "default_output_length": 4,
    }
    config = transformers.Gemma4Config(
        text_config=TEXT | common | text,
        vision_config=TOWER | tower,
        audio_config=None,
        boi_token_id=BEGIN,
        eoi_token_id=END,
        video_token_id=191,
        audio_token_id=197,
        **IDS,
    )
    grid = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1).reshape(1, 16, 2)
    model = transformers.Gemma4ForConditionalGeneration(config)
    return Tiny(
        model,
        lambda: {"pixel_values": torch.rand(1, 16, 48), "image_position_ids": grid},
        4,
        (BEGIN,),
        (END,),
    )


def gemma4() -> Tiny:
    return _gemma4()


# Of the larger ones: tokens of an image see each other where layers have a window.
_GEMMA4_LARGE: dict[str, Any] = {
    "use_bidirectional_attention": "vision",
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "global_head_dim": 32,
    "final_logit_softcapping": 30.0,
}


def gemma4_large() -> Tiny:
    return _gemma4(**_GEMMA4_LARGE)


def gemma4_moe() -> Tiny:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    return _gemma4(**_GEMMA4_LARGE, **experts)


def paligemma() -> Tiny:
    config = transformers.PaliGemmaConfig(
        text_config=TEXT | {"model_type": "gemma2", "head_dim": 16, "sliding_window": 8},
        vision_config=TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        projection_dim=HIDDEN,
        hidden_size=HIDDEN,
        **IDS,
    )
    model = transformers.PaliGemmaForConditionalGeneration(config)
    return Tiny(model, pixels(1, 3, 16, 16), 16, first=True)


ALL = [
    aria,
    aya_vision,
    cohere2_vision,
    gemma3,
    gemma4,
    gemma4_large,
    gemma4_moe,
    glm46v,
    glm4v,
    glm4v_moe,
    idefics2,
    idefics3,
    internvl,
    llava,
    llava_next,
    llava_onevision,
    mistral3,
    paddleocr_vl,
    paligemma,
    pixtral_llava,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_5,
    qwen3_5_moe,
    qwen3_vl,
    qwen3_vl_moe,
    smolvlm,
    vipllava,
]
# Those whose text model the fused stack runs.
FUSED = [
    idefics2,
    idefics3,
    internvl,
    llava,
    llava_next,
    llava_onevision,
    mistral3,
    paddleocr_vl,
    pixtral_llava,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
    smolvlm,
    vipllava,
]
