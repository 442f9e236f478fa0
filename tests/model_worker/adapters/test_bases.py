"""Adapters that PEFT saves, on bases that are no plain checkpoints: GGUF files, and models that take images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model_worker.pipelines.text import TextPipeline
from model_worker.runner import ModelRunner
from tests.model_worker.adapters.test_adapters import prompt
from tests.model_worker.loading.test_gguf import TOKENS, load, written
from tests.model_worker.vision.test_families import answers, assert_equal, context_of, generated
from tests.model_worker.vision.tiny_composites import qwen2_vl, qwen3_vl
from tests.model_worker.vision.tiny_parts import Tiny, made

peft: Any = pytest.importorskip("peft")


def adapted(model: Any, folder: Path, targets: Any) -> Any:
    """Put an adapter with random weights into a model, and save it. Returns PEFT's model."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets)).eval()
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.1)
    wrapped.save_pretrained(folder)
    return wrapped


@pytest.mark.parametrize(
    ("family", "targets"), [("llama", "all-linear"), ("qwen2", "all-linear"), ("qwen3_moe", ["q_proj", "o_proj"])]
)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_on_a_gguf_file_as_on_its_decoded_weights(family: str, targets: Any, kind: str, tmp_path: Path) -> None:
    reference = written(tmp_path / "model.gguf", family, kind)
    model = adapted(reference, tmp_path / "adapter", targets)
    loaded = load(tmp_path / "model.gguf")
    backend = ModelRunner(loaded, 8, 16).backend
    tokens = TOKENS[0].numpy()
    blocks = torch.arange(4).numpy()
    plain = backend.logits(prompt(tokens, blocks, 0))
    backend.load_adapter(2, str(tmp_path / "adapter"))
    with torch.no_grad():
        want = model(input_ids=TOKENS).logits[0]
    got = backend.logits(prompt(tokens, blocks, 2))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert (got - plain).norm() > 1e-2 * want.norm()


TEXT = r".*language_model.*\.(q_proj|v_proj|down_proj)|lm_head"
BOTH = r".*(language_model.*\.(q_proj|v_proj)|visual\.(blocks|merger).*\.(qkv|proj|fc1|fc2|linear_fc1|linear_fc2))"


@pytest.mark.parametrize("targets", [TEXT, BOTH, r".*visual.*\.(qkv|fc1|linear_fc1)"], ids=["text", "both", "tower"])
@pytest.mark.parametrize("make", [qwen2_vl, qwen3_vl], ids=lambda make: make.__name__)
def test_answers_about_images_are_pefts(make: Callable[[], Tiny], targets: str, tmp_path: Path) -> None:
    tiny = made(make)
    tiny.model.save_pretrained(tmp_path / "model")
    with torch.random.fork_rng():
        torch.manual_seed(7)
        image = tiny.draw()
    case = [[3, 4, 5], [7, 8, 9]], [image]
    base = generated(tiny, *case)
    adapted(tiny.model, tmp_path / "adapter", targets)
    want = generated(tiny, *case)
    assert not torch.allclose(want[1], base[1], atol=1e-2)
    pipeline = TextPipeline.load(tmp_path / "model", dtype="float32", kv_memory=1 << 22)
    try:
        pipeline.load_adapter("a", tmp_path / "adapter")
        context = context_of(tiny, *case)
        context.adapter = "a"
        # The same image for both: features belong to the content of what has changed them.
        got = answers(pipeline, [context, context_of(tiny, *case)])
        assert_equal(got[0], want)
        assert_equal(got[1], base)
    finally:
        pipeline.close()
