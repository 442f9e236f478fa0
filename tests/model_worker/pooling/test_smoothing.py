"""Smoothing changes no model, and lets int8 weights keep more of one whose inputs differ widely."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel

from model_worker.cpu.gemm.packed_linear import pack_linears, quantize_linears
from model_worker.pooling.load import load_pooling
from model_worker.pooling.smoothing import scale_inputs, smooth
from shared.pooling_files import PoolingFiles
from tests.model_worker.pooling.tiny_encoders import random_texts, save, save_tokenizer


def with_outliers(path: Any) -> Any:
    """A tiny encoder whose norms make a few inputs of all layers fifty times as large as the others."""
    save("bert", path)
    auto: Any = AutoModel
    model = auto.from_pretrained(path).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight[:2] *= 50
        for layer in model.encoder.layer:
            for linear in (layer.attention.self.query, layer.attention.self.key, layer.intermediate.dense):
                linear.weight[:, :2] /= 50
    return model


def states(model: Any, texts: list[Any]) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(input_ids=torch.from_numpy(text)[None].long()).last_hidden_state[0] for text in texts])


def test_a_smoothed_model_is_the_same_model(tmp_path: Any) -> None:
    model = with_outliers(tmp_path)
    texts = random_texts(5)
    want = states(model, texts)
    scales = smooth(model, lambda: states(model, texts))
    first = "encoder.layer.0.attention.self"
    assert torch.equal(scales[f"{first}.query"], scales[f"{first}.value"])
    assert float(scales[f"{first}.query"][0]) < 0.5 * float(scales[f"{first}.query"].median())
    scale_inputs(model, scales)
    assert torch.allclose(states(model, texts), want, rtol=1e-4, atol=1e-4)


def test_int8_weights_of_a_smoothed_model_are_closer(tmp_path: Any) -> None:
    texts = random_texts(8)
    angles = []
    for smoothed in (False, True):
        model = with_outliers(tmp_path)
        want = states(model, texts)
        with torch.inference_mode():
            scales = smooth(model, lambda: states(model, texts)) if smoothed else {}  # noqa: B023 - called at once
            pack_linears(model, quantized=quantize_linears(model))
            scale_inputs(model, scales)
        angles.append(float((1 - torch.cosine_similarity(states(model, texts), want)).mean()))
    assert angles[1] < angles[0]


def test_an_int8_encoder_rounds_activations_and_keeps_the_direction(tmp_path: Any) -> None:
    save("bert", tmp_path)
    save_tokenizer(tmp_path)
    assert PoolingFiles.read(tmp_path).frame_tokens == ([2], [3])
    pooler = load_pooling(tmp_path, quantization="int8")
    assert pooler.backend == "transformers, packed texts, fused layers, int8 weights"


def test_tokens_that_frame_texts_are_found_where_files_name_them(tmp_path: Any) -> None:
    save("bert", tmp_path)
    assert PoolingFiles.read(tmp_path).frame_tokens == ([], [])


def test_a_model_whose_kernels_are_missing_runs_without_and_says_so(tmp_path: Any) -> None:
    save("bert", tmp_path / "bert")
    save("albert", tmp_path / "other")
    late = load_pooling(tmp_path / "bert", has_kernels=lambda _: False)
    assert (late.backbone.description, late.waits_for_kernels) == ("packed texts", True)
    assert not load_pooling(tmp_path / "bert").waits_for_kernels
    assert not load_pooling(tmp_path / "other", has_kernels=lambda _: False).waits_for_kernels


@pytest.mark.parametrize("name", ["distilbert", "mpnet"])
def test_other_encoders_are_smoothed_too(name: str, tmp_path: Any) -> None:
    save(name, tmp_path)
    assert load_pooling(tmp_path, quantization="int8").backend.endswith("int8 weights")
