"""`tokenyard serve FILE.gguf`: over HTTP it answers as the Hugging Face directory that the file was made of."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.api_server.conftest import CHATML
from tests.gguf_models import byte_pairs, write_model
from tests.system.server import Server, free_port

MESSAGES = [{"role": "user", "content": "What is a fox?"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "animal", "schema": {"enum": ["fox", "dog"]}}}
# Log-probabilities that rounding in float32 may order either way.
TIE = 1e-4
QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3, "ignore_eos": True}),
    ("/v1/completions", {"prompt": "The quick <|im_start|> brown", "logprobs": 2, "echo": True, "ignore_eos": True}),
    ("/v1/chat/completions", {"messages": MESSAGES, "response_format": SCHEMA}),
]


def test_it_answers_as_the_directory_does(model: Path, server: Server, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tokens = byte_pairs(Tokenizer.from_file(str(model / "tokenizer.json")), "gpt-2")
    write_model(
        path, AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), "llama", "F32", tokens, template=CHATML
    )
    flags = ["--kv-memory", "2MB", "--max-running", "8"]
    with Server(path, flags, tmp_path / "log") as running:
        for route, question in QUESTIONS:
            body = {"temperature": 0, "max_tokens": 24, **question}
            found = running.post(route, {"model": "tiny", **body})
            wanted = server.post(route, {"model": model.name, **body})
            assert texts(found) == texts(wanted) or part_at_a_tie(found, wanted)
            assert found["usage"] == wanted["usage"]
        assert [card["id"] for card in json.loads(get(running, "/v1/models"))["data"]] == ["tiny"]


def part_at_a_tie(found: Any, wanted: Any) -> bool:
    """Whether two tokens were equally likely where the answers part: one server may compute in compiled kernels, the
    other in plain torch, and the weights are random."""
    ours, theirs = (answer["choices"][0]["logprobs"] for answer in (found, wanted))
    for one, other in zip(ours.get("content", []), theirs.get("content", []), strict=True):
        if one["token"] != other["token"]:
            return bool(abs(one["logprob"] - one["top_logprobs"][1]["logprob"]) < TIE)
    return False


def texts(answer: Any) -> list[Any]:
    return [(choice.get("text"), choice.get("message"), choice["finish_reason"]) for choice in answer["choices"]]


def get(server: Server, path: str) -> bytes:
    with urllib.request.urlopen(server.url + path, timeout=90) as response:
        found: bytes = response.read()
    return found


def test_a_damaged_file_ends_the_server_at_once(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + bytes([3, 0, 0, 0]) + bytes([255] * 16))
    command = [sys.executable, "-m", "deploy.cli", "serve", str(path), "--port", str(free_port())]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert "the number of tensors is" in line
    assert str(path) in line
