"""Adapters on models of the one-shot tasks: the values of PEFT's own forward pass, beside texts of the model itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoModelForSequenceClassification

from interfaces import Batch, PooledValues, PoolingContext, PoolingTask
from model_worker.adapters.refusal import AdapterRefused
from model_worker.one_shot import TextRunner
from model_worker.pooling.load import load_pooling
from model_worker.pooling.pooler import Pooler
from tests.model_worker.pooling.tiny_encoders import DECODERS, random_texts, save

peft: Any = pytest.importorskip("peft")

# Configurations, and what of them is adapted. Those of one compiled call and those of transformers' layers, packed and
# padded, with joined projections, and with an embedding of tokens.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("bert", {"target_modules": "all-linear"}),
    ("xlm-roberta", {"target_modules": ["query", "value"], "use_dora": True}),
    ("modernbert", {"target_modules": ["Wqkv", "Wo", "Wi"]}),
    ("distilbert", {"target_modules": ["q_lin", "word_embeddings"]}),
    ("qwen3", {"target_modules": "all-linear", "use_rslora": True}),
    ("deberta-v2", {"target_modules": ["query_proj", "dense"], "bias": "lora_only"}),
]


def adapted(model: Any, folder: Path, **values: Any) -> Any:
    """Put an adapter with random weights into a model, and save it. Returns PEFT's model."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **values)).eval()
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_" in name and "magnitude" not in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.2)
                elif (
                    "magnitude" in name
                    or "modules_to_save" in name
                    or ("bias" in values and name.endswith("base_layer.bias"))
                ):
                    parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    wrapped.save_pretrained(folder)
    return wrapped


def expected(model: Any, texts: list[NDArray[np.int32]], last: bool) -> NDArray[np.float32]:
    rows = []
    with torch.inference_mode():
        for text in texts:
            states = model(input_ids=torch.tensor([text.tolist()])).last_hidden_state[0]
            rows.append(torch.nn.functional.normalize(states[-1] if last else states.mean(0), dim=-1).numpy())
    return np.stack(rows)


def embed(pooler: Pooler, texts: list[NDArray[np.int32]], handle: int = 0) -> NDArray[np.float32]:
    return pooler.run(PoolingContext.of(texts, PoolingTask.EMBED, adapter_handle=handle))[0]


@pytest.mark.parametrize(("name", "values"), CASES, ids=[name for name, _ in CASES])
def test_vectors_are_pefts_and_those_of_the_model_stay(name: str, values: dict[str, Any], tmp_path: Path) -> None:
    path = save(name, tmp_path / "model")
    auto: Any = AutoModel
    model = adapted(auto.from_pretrained(path), tmp_path / "adapter", **values)
    pooler = load_pooling(path, dtype="float32", max_batch_tokens=150)
    texts = random_texts(9)
    before = embed(pooler, texts)
    assert pooler.adapters is not None
    facts = pooler.adapters.load_adapter(5, str(tmp_path / "adapter"))
    assert (facts.rank, facts.size > 0) == (4, True)
    want = expected(model, texts, name in DECODERS)
    np.testing.assert_allclose(embed(pooler, texts, 5), want, atol=3e-5)
    assert np.abs(want - before).max() > 1e-2
    assert embed(pooler, texts).tobytes() == before.tobytes()
    pooler.adapters.drop_adapter(5)
    assert embed(pooler, texts).tobytes() == before.tobytes()


@pytest.mark.parametrize("name", ["bert", "roberta", "qwen3"])
def test_a_classifier_that_an_adapter_brings_gives_its_labels(name: str, tmp_path: Path) -> None:
    auto: Any = AutoModelForSequenceClassification
    path = save(name, tmp_path / "model", auto=auto, num_labels=3)
    values = {"task_type": "SEQ_CLS", "target_modules": ["q_proj"] if name == "qwen3" else ["query", "value"]}
    wrapped = adapted(auto.from_pretrained(path), tmp_path / "adapter", **values)
    pooler = load_pooling(path, dtype="float32")
    assert pooler.adapters is not None
    pooler.adapters.load_adapter(1, str(tmp_path / "adapter"))
    texts = random_texts(6)
    context = PoolingContext.of(texts, PoolingTask.CLASSIFY, activate=False, adapter_handle=1)
    with torch.inference_mode():
        want = torch.cat([wrapped(input_ids=torch.tensor([text.tolist()])).logits for text in texts]).numpy()
    np.testing.assert_allclose(pooler.run(context)[0], want, atol=1e-4 * np.abs(want).max())


def test_int8_weights_with_an_adapter_are_as_close_as_without(tmp_path: Path) -> None:
    path = save("bert", tmp_path / "model")
    auto: Any = AutoModel
    model = adapted(auto.from_pretrained(path), tmp_path / "adapter", target_modules="all-linear", use_dora=True)
    texts = random_texts(9)
    pooler = load_pooling(path, dtype="float32", quantization="int8")
    plain = np.abs(embed(pooler, texts) - expected(auto.from_pretrained(path).eval(), texts, last=False)).max()
    assert pooler.adapters is not None
    pooler.adapters.load_adapter(1, str(tmp_path / "adapter"))
    error = np.abs(embed(pooler, texts, 1) - expected(model, texts, last=False)).max()
    assert error < max(3 * plain, 0.05)


def test_a_batch_has_texts_of_several_adapters(tmp_path: Path) -> None:
    path = save("bert", tmp_path / "model")
    auto: Any = AutoModel
    pooler = load_pooling(path, dtype="float32")
    assert pooler.adapters is not None
    models = {0: auto.from_pretrained(path).eval()}
    for handle, targets in ((1, ["query"]), (2, ["value", "dense"])):
        folder = tmp_path / str(handle)
        models[handle] = adapted(auto.from_pretrained(path), folder, target_modules=targets)
        pooler.adapters.load_adapter(handle, str(folder))
    parts = [random_texts(3) for _ in range(6)]
    contexts = [
        PoolingContext.of(texts, PoolingTask.EMBED, adapter_handle=place % 3) for place, texts in enumerate(parts)
    ]
    result = TextRunner(pooler, 0, 1).run(Batch(1, 1, 1, contexts))
    assert result.errors == {}
    for place, (texts, values) in enumerate(zip(parts, result.parts, strict=True)):
        assert isinstance(values, PooledValues)
        np.testing.assert_allclose(values.array, expected(models[place % 3], texts, last=False), atol=3e-5)


def test_an_adapter_of_another_model_is_refused_by_the_module(tmp_path: Path) -> None:
    auto: Any = AutoModel
    other = save("qwen3", tmp_path / "other")
    adapted(auto.from_pretrained(other), tmp_path / "adapter", target_modules=["q_proj"])
    pooler = load_pooling(save("bert", tmp_path / "model"), dtype="float32")
    assert pooler.adapters is not None
    with pytest.raises(AdapterRefused, match=r"no module layers\.0\.self_attn\.q_proj"):
        pooler.adapters.load_adapter(1, str(tmp_path / "adapter"))
