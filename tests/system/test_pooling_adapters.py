"""An adapter of an embedding model over HTTP: PEFT's vectors by the adapter's name, through loads and a death."""

from __future__ import annotations

import base64
import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tests.system.pooling_models import LONGEST
from tests.system.server import Server
from tests.system.test_pooling import sentence, vectors

peft: Any = pytest.importorskip("peft")

NAME = "tuned"


def tuned(path: Path, folder: Path) -> Any:
    """Put an adapter with random weights into the model, and save it. Returns PEFT's model."""
    auto: Any = AutoModel
    with torch.random.fork_rng():
        torch.manual_seed(2)
        config = peft.LoraConfig(task_type="FEATURE_EXTRACTION", r=4, target_modules=["query", "value", "dense"])
        model = peft.get_peft_model(auto.from_pretrained(path, dtype=torch.float32), config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def expected(model: Any, path: Path, texts: list[str]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = []
    with torch.inference_mode():
        for text in texts:
            inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=LONGEST)
            mean = model(**inputs).last_hidden_state[0].mean(0)
            rows.append((mean / mean.norm()).numpy())
    return np.stack(rows)


def knows(server: Server, name: str) -> bool:
    """Whether the API process that answers has the adapter: a process hears of orders by the next status."""
    body = {"model": name, "input": "fox"}
    return httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60).status_code == 200


def embed(server: Server, model: str, texts: list[str]) -> Any:
    answer = server.post("/v1/embeddings", {"model": model, "input": texts, "encoding_format": "float"})
    assert answer["model"] == (model or "tiny-embedder")
    return np.array([item["embedding"] for item in answer["data"]], np.float32)


def test_an_adapters_vectors_are_pefts_beside_those_of_the_model(
    embedding: Server, embedder: Path, tmp_path: Path
) -> None:
    model = tuned(embedder, tmp_path / "adapter")
    texts = [sentence(1 + i % 30) for i in range(40)]
    own = vectors(embedder, texts)
    other = expected(model, embedder, texts)
    assert np.abs(own - other).max() > 1e-2
    weights = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    order = {
        "lora_name": NAME,
        "config_dict": json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()),
        "serialized_named_tensors": base64.b64encode(weights).decode(),
    }
    try:
        assert embedding.post("/load_lora_adapter_from_tensors", order)["success"]
        embedding.wait_for("both API processes know it", 30, lambda: all(knows(embedding, NAME) for _ in range(20)))
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda i: embed(embedding, (NAME, "")[i % 2], texts), range(8)))
        for i, got in enumerate(found):
            assert np.abs(got - (other, own)[i % 2]).max() < 1e-5, i
        embedding.child("model_worker").send_signal(signal.SIGKILL)
        assert np.abs(embed(embedding, NAME, texts) - other).max() < 1e-5
        pooled = embedding.post("/pooling", {"model": NAME, "input": texts[0]})["data"][0]["data"]
        assert np.abs(np.array(pooled) - other[0]).max() < 1e-5
    finally:
        gone = httpx.post(f"{embedding.url}/v1/unload_lora_adapter", json={"lora_name": NAME}, timeout=60)
    assert gone.status_code == 200
    embedding.wait_for("the name is gone", 30, lambda: not any(knows(embedding, NAME) for _ in range(20)))
    assert np.abs(embed(embedding, "", texts) - own).max() < 1e-5
