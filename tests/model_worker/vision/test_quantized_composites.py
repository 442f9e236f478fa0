"""Models with images whose weights are quantized: the decoder's stay in their bits, and answers are those of the
weights that the files mean, with an image and without one, with the encoder of images and without it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from interfaces import SamplingParams, TextContext
from model_worker.batch import ForwardBatch
from model_worker.cpu import kernel_cache
from model_worker.cpu.gemm.coded_linear import CodedLinear
from model_worker.loading.load import load_model
from model_worker.pipelines.text import TextPipeline
from model_worker.runner import ModelRunner
from model_worker.vision.composite import text_modules, tower_parameters
from tests.model_worker.loading.quantized_checkpoints import FORMATS, quantize_checkpoint
from tests.model_worker.vision.test_families import TOKENS, answers, context_of
from tests.model_worker.vision.tiny_composites import gemma3, mistral3, qwen2_5_vl, qwen2_vl
from tests.model_worker.vision.tiny_parts import Tiny, made

TEXT = [3, 4, 5, 6, 7, 8]
# Models as they are on the hub: the format, what of a name says that a weight is not quantized, and the bits of panels.
KINDS: list[tuple[Callable[[], Tiny], str, str, int]] = [
    (qwen2_5_vl, "awq", "visual", 4),
    (gemma3, "w4a16", "vision", 4),
    (gemma3, "w8a8", "vision", 8),
    (qwen2_vl, "gptq", "visual", 4),
    # Its tower is quantized, too.
    (mistral3, "fp8 of tensors", "", 8),
]


def written(make: Callable[[], Tiny], form: str, ignored: str, folder: Path) -> tuple[Path, Tiny]:
    """Write a quantized checkpoint, and return it with the model that it means."""
    tiny = made(make)
    tiny.model.save_pretrained(folder / "plain")
    path = quantize_checkpoint(folder / "plain", folder / "quantized", FORMATS[form], ignored=ignored)
    meant = AutoModelForImageTextToText.from_pretrained(path / "exact", dtype=torch.float32)
    meant.set_attn_implementation("eager")
    return path, tiny._replace(model=meant.eval())


def likelihoods(tiny: Tiny, prompt: list[int], answer: list[int], images: list[dict[str, Tensor]]) -> Tensor:
    """Log-probabilities of an answer's tokens, as transformers computes them."""
    tokens = np.array([*prompt, *answer])
    inputs = tiny.inputs(tokens, images) if images else {"input_ids": torch.from_numpy(tokens)[None]}
    with torch.inference_mode():
        logits: Tensor = tiny.model(**inputs).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logits[torch.arange(len(answer)), torch.tensor(answer)]


def compare(tiny: Tiny, pipeline: TextPipeline, images: list[dict[str, Tensor]], error: float) -> None:
    """Compare the likelihoods of greedy answers about each image, and about a text alone."""
    greedy = SamplingParams(max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    text: Any = TextContext.from_prompt(np.array(TEXT), greedy, log_probabilities=1)
    asked: list[tuple[list[int], list[dict[str, Tensor]], Any]] = [(TEXT, [], text)]
    for image in images:
        texts = [TEXT[:3], TEXT[3:]]
        asked.append((tiny.prompt(texts)[0].tolist(), [image], context_of(tiny, texts, [image])))
    found = answers(pipeline, [context for _, _, context in asked])
    for (prompt, shown, _), (answer, got) in zip(asked, found, strict=True):
        want = likelihoods(tiny, prompt, answer, shown)
        assert float((got - want).norm() / want.norm()) < error


@pytest.mark.parametrize(
    ("make", "form", "ignored"), [kind[:3] for kind in KINDS], ids=lambda one: getattr(one, "__name__", None)
)
def test_answers_are_those_of_the_weights_meant(
    make: Callable[[], Tiny], form: str, ignored: str, tmp_path: Path
) -> None:
    path, tiny = written(make, form, ignored, tmp_path)
    pipeline = TextPipeline.load(path, dtype="float32", kv_memory=1 << 22)
    try:
        compare(tiny, pipeline, [tiny.draw(), tiny.draw()], 1e-3)
    finally:
        pipeline.close()


# The stack of weights in codes is compiled.
@pytest.mark.slow
@pytest.mark.parametrize(("make", "form", "ignored", "bits"), KINDS, ids=lambda one: getattr(one, "__name__", None))
def test_weights_of_the_decoder_stay_in_their_bits(
    make: Callable[[], Tiny], form: str, ignored: str, bits: int, tmp_path: Path
) -> None:
    path, tiny = written(make, form, ignored, tmp_path)
    pipeline = TextPipeline.load(path, dtype="bfloat16", kv_memory=1 << 22)
    try:
        loaded = pipeline._runner.loaded
        assert loaded.kernel_family == kernel_cache.CODED
        assert (loaded.stack is not None) == (make is not gemma3)
        check_bits(loaded.model, tiny, bits)
        # Its encoder has plain weights, and none of the decoder's: no decoded copy is left anywhere.
        assert loaded.encoder is not None
        composite = loaded.encoder.composite
        assert all(type(one) is nn.Linear for layer in loaded.encoder.layers() for one in linears(layer).values())
        left = sum(parameter.nbytes for parameter in composite.parameters())
        tower = sum(parameter.nbytes for parameter in tower_parameters(composite))
        plain = sum(parameter.nbytes for parameter in loaded.model.parameters())
        assert left - tower == plain
        # Codes of 8 bits mean large weights here, so that attention is sharp and what bfloat16 rounds shows.
        compare(tiny, pipeline, [tiny.draw(), tiny.draw()], 0.2 if bits == 8 else 0.05)
    finally:
        pipeline.close()


def linears(model: nn.Module) -> dict[str, nn.Module]:
    return {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear | CodedLinear)}


def check_bits(text: Any, tiny: Tiny, bits: int) -> None:
    """Check that the decoder's projections are in codes which are the weights meant."""
    meant: Any = tiny.model.model.language_model
    decoder = text.model
    projections = {name: one for name, one in linears(decoder).items() if name.endswith("_proj")}
    assert len(projections) == 7 * text.config.num_hidden_layers
    for name, one in projections.items():
        assert isinstance(one, CodedLinear)
        assert one.layout.bits == bits
        assert torch.equal(one.rows(torch.arange(one.out_features)), meant.get_submodule(name).weight)
    names = {name.removesuffix(".weight") for name, _ in decoder.named_parameters()}
    assert not names & projections.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("make", "form"), [(qwen2_5_vl, "awq"), (gemma3, "w4a16")])
def test_text_alone_is_served_in_its_bits(make: Callable[[], Tiny], form: str, tmp_path: Path) -> None:
    path, tiny = written(make, form, "vis", tmp_path)
    loaded = load_model(path, "bfloat16", "cpu", lambda *_: None, vision=False)
    assert loaded.encoder is None
    check_bits(loaded.model, tiny, 4)
    tokens = torch.tensor([TEXT])
    count = np.array([len(TEXT)])
    batch = ForwardBatch.build(tokens[0].numpy(), count, count, np.array([[0]]), 16, np.arange(len(TEXT)))
    got = ModelRunner(loaded, 4, 16).backend.logits(batch)
    with torch.inference_mode():
        want = tiny.model(input_ids=tokens).logits[0]
    assert float((got - want).norm() / want.norm()) < 0.05


def test_parts_that_are_not_found_are_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    composite = made(gemma3).model
    found = text_modules(composite)
    assert composite.model.language_model in found
    assert composite.get_output_embeddings() in found
    del composite.model.language_model
    with pytest.raises(ValueError, match=r"no text model is found in gemma3 under model\.language_model or"):
        text_modules(composite)
    config: Any = composite.config
    config.model_type = "mllama"
    with caplog.at_level(logging.WARNING):
        assert text_modules(composite) == set()
    assert "no text model is found in mllama" in caplog.text
