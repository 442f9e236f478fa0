"""Directories of strangers: what cannot be read or computed is refused by name, before it costs anything."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from model_worker.adapters.config import parse_config
from model_worker.adapters.files import CONFIG, PICKLE, WEIGHTS, read_files
from model_worker.adapters.fitting import MOST_RANK, read_adapter
from model_worker.adapters.refusal import AdapterRefused

PREFIX = "base_model.model."
PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


class Model(nn.Module):
    """Modules by the names that adapters use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.proj = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(4)
        self.experts = nn.ModuleList([nn.Linear(4, 6)])
        self.lm_head = nn.Linear(4, 7, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed


def pair(module: str = "proj", inputs: int = 4, outputs: int = 6, rank: int = 2) -> dict[str, torch.Tensor]:
    return {
        f"{PREFIX}{module}.lora_A.weight": torch.randn(rank, inputs),
        f"{PREFIX}{module}.lora_B.weight": torch.randn(outputs, rank),
    }


def write(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    (folder / CONFIG).write_text(json.dumps({**PLAIN, **config}), encoding="utf-8")
    save_file(tensors, folder / WEIGHTS)
    return folder


def read(folder: Path, most_bytes: int = 1 << 20) -> Any:
    model: Any = Model()
    return read_adapter(folder, model, most_bytes)


def raw(folder: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / CONFIG).write_text(json.dumps(PLAIN), encoding="utf-8")
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return folder


def test_a_plain_adapter_is_read(tmp_path: Path) -> None:
    adapter = read(write(tmp_path, pair()))
    (linear,) = adapter.linears.values()
    assert adapter.rank == 2
    assert linear.scale == 2.0


@pytest.mark.parametrize(("kind", "factor"), [(BartScaledWordEmbedding, 55.42), (Gemma3TextScaledWordEmbedding, 55.5)])
def test_a_change_of_an_embedding_is_scaled_as_its_rows_are(kind: Any, factor: float, tmp_path: Path) -> None:
    """By a number as it is, and by a tensor as the module rounds it."""
    model: Any = Model()
    model.embed = kind(7, 4, 0, 55.42)
    model.embed.weight.data = model.embed.weight.data.bfloat16()
    tensors = {
        f"{PREFIX}embed.lora_embedding_A": torch.randn(2, 7),
        f"{PREFIX}embed.lora_embedding_B": torch.randn(4, 2),
    }
    adapter = read_adapter(write(tmp_path, tensors), model, 1 << 20)
    assert adapter.embedding is not None
    assert adapter.embedding.scale == 2 * factor


def test_the_digest_names_the_content(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abcd"]
    tensors = pair()
    other = {name: tensor.clone() for name, tensor in tensors.items()}
    other[f"{PREFIX}proj.lora_A.weight"][0, 0] += 1
    for folder, content, alpha in zip(folders, (tensors, tensors, other, tensors), (4, 4, 4, 5), strict=True):
        folder.mkdir()
        write(folder, content, lora_alpha=alpha)
    digests = [read(folder).digest for folder in folders]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_of_each_type_are_read_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in pair().items()}
    got = read_files(write(tmp_path, tensors), 1 << 20).tensors
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())


def test_no_adapter_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=CONFIG):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no adapter"):
        read(tmp_path / "nothing")


def test_pickles_are_never_read(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps(PLAIN), encoding="utf-8")
    (tmp_path / PICKLE).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(AdapterRefused, match="safe_serialization"):
        read(tmp_path)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_folder_that_has_become_a_link_is_not_followed(depth: int, tmp_path: Path) -> None:
    """Whoever may write below a folder of lora_dirs may change it after its path was checked."""
    folder = tmp_path / "mine" / "adapter"
    folder.mkdir(parents=True)
    write(folder, pair())
    read(folder)
    swapped = (folder, folder.parent)[depth]
    swapped.rename(tmp_path / "elsewhere")
    swapped.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AdapterRefused, match=f"'{swapped.name}' in .* is no folder, or a link"):
        read(folder)


def linked(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "elsewhere")
    (folder / WEIGHTS).symlink_to(folder / "elsewhere")


def piped(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def a_folder(folder: Path) -> None:
    (folder / CONFIG).unlink()
    (folder / CONFIG).mkdir()


def endless_config(folder: Path) -> None:
    with (folder / CONFIG).open("wb") as file:
        file.truncate(2 << 30)


def nested_config(folder: Path) -> None:
    (folder / CONFIG).write_bytes(b"[" * 100_000)


def endless_weights(folder: Path) -> None:
    with (folder / WEIGHTS).open("wb") as file:
        file.truncate(2 << 40)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (linked, "links are not followed"),
        (piped, "no regular file"),
        (a_folder, "no regular file"),
        (endless_config, "at most"),
        (nested_config, "not valid JSON"),
        (endless_weights, "at most"),
    ],
)
def test_files_that_are_none_are_refused_at_once(spoil: Callable[[Path], None], reason: str, tmp_path: Path) -> None:
    spoil(write(tmp_path, pair()))
    began = time.process_time()
    with pytest.raises(AdapterRefused, match=reason):
        read(tmp_path)
    assert time.process_time() - began < 20


def test_links_of_the_hubs_cache_are_followed_within_a_repository(tmp_path: Path) -> None:
    repository = tmp_path / "models--someone--adapter"
    snapshot = repository / "snapshots" / "abc"
    blobs = repository / "blobs"
    snapshot.mkdir(parents=True)
    write(snapshot, pair())
    blobs.mkdir()
    (snapshot / WEIGHTS).rename(blobs / "123")
    (snapshot / WEIGHTS).symlink_to("../../blobs/123")
    assert read(snapshot).rank == 2
    (blobs / "123").rename(tmp_path / "secret")
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to(tmp_path / "secret")
    with pytest.raises(AdapterRefused, match="links are not followed"):
        read(snapshot)


def entry(**changed: Any) -> dict[str, Any]:
    return {f"{PREFIX}proj.lora_A.weight": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32], **changed}}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"no JSON", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (entry(dtype="I64"), "type 'I64'"),
        (entry(dtype=["F32"]), "type"),
        (entry(shape=[1 << 40, 1 << 40]), "lies at bytes"),
        (entry(shape=[-2, -4]), "broken entry"),
        (entry(shape=[0, 4], data_offsets=[0, 0]), "empty"),
        (entry(shape=[True, 8]), "broken entry"),
        (entry(shape=None), "broken entry"),
        (entry(data_offsets=[16, 48]), "lies at bytes"),
        (entry(data_offsets=[32, 0]), "lies at bytes"),
        (entry(data_offsets=[0]), "no begin and end"),
        ({f"{PREFIX}proj.lora_A.weight": 7}, "type None"),
        (entry() | {"other": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "where another one does"),
    ],
)
def test_lying_headers_are_refused(header: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused, match=reason):
        read(raw(tmp_path, header, data=bytes(32)))


@pytest.mark.parametrize("length", [2 << 30, 1 << 63, 33])
def test_headers_that_would_be_longer_than_the_file_are_refused(length: int, tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused, match="announces a header"):
        read(raw(tmp_path, entry(), length=length + len(json.dumps(entry()))))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"modules_to_save": "lm_head"}, "modules_to_save"),
        ({"trainable_token_indices": [-3]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 4], [2, 5]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"a_key_of_next_year": {"x": 1}}, "a_key_of_next_year"),
        ({"init_lora_weights": "pissa"}, "changes the base model"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"init_lora_weights": "olora"}, "changes the base model"),
        ({"bias": "some"}, "bias"),
        ({"lora_alpha": "much"}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"use_dora": "yes"}, "use_dora"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern"),
        ({"alpha_pattern": {"(?=q)": 3}}, "matched safely"),
        ({"alpha_pattern": {r"(q)\1": 3}}, "matched safely"),
        ({"alpha_pattern": {"q" * 600: 3}}, "longer than"),
        ({"alpha_pattern": {"(a{1,900}){1,900}": 3}}, "matched safely"),
        ({"alpha_pattern": {f"{'a' * 400}{number}": 3 for number in range(99)}}, "too complex"),
    ],
)
def test_configs_that_ask_for_more_are_refused_by_their_key(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(AdapterRefused, match=reason):
        parse_config({**PLAIN, **config})


def test_patterns_match_as_pefts_and_in_linear_time() -> None:
    config = parse_config(
        {
            **PLAIN,
            "use_rslora": True,
            "alpha_pattern": {r"layers\.1\d\..*": 8, "q_proj": 16, "(a+)+b": 3},
        }
    )
    assert config.scale("model.layers.12.mlp", 4) == 4.0
    assert config.scale("model.layers.2.q_proj", 4) == 8.0
    assert config.scale("model.layers.2.my_q_proj", 4) == 2.0
    began = time.process_time()
    assert config.scale(f"model.{'a' * 5000}", 4) == 2.0
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    ("tensors", "config", "reason"),
    [
        ({}, {}, "no tensors"),
        (pair("q_proj"), {}, "no module q_proj"),
        (pair(inputs=5), {}, "another model"),
        (pair(outputs=7), {}, "another model"),
        (pair(rank=MOST_RANK + 1), {}, "at most"),
        (pair("norm"), {}, "LayerNorm"),
        (pair("experts.0"), {}, "expert"),
        (pair("embed", 7, 4), {}, "adapted as a linear module"),
        ({f"{PREFIX}proj.lora_A.weight": torch.zeros(2, 4)}, {}, "no lora_B.weight"),
        ({**pair(), f"{PREFIX}proj.lora_B.weight": torch.zeros(6, 3)}, {}, "do not multiply"),
        ({**pair(), f"{PREFIX}proj.lora_A.weight": torch.full((2, 4), np.inf)}, {}, "not finite"),
        ({**pair(), f"{PREFIX}proj.lora_magnitude_vector": torch.ones(6)}, {}, "use_dora"),
        (pair(), {"use_dora": True}, "use_dora"),
        ({**pair(), f"{PREFIX}lm_head.weight": torch.ones(7, 4)}, {}, "not a part of a LoRA adapter"),
        ({**pair(), f"{PREFIX}norm.bias": torch.ones(4)}, {"bias": "all"}, "LayerNorm"),
        ({**pair("lm_head", 4, 7), f"{PREFIX}lm_head.base_layer.weight": torch.ones(7, 4)}, {}, "differs"),
        ({**pair("lm_head", 4, 7), f"{PREFIX}lm_head.base_layer.weight": torch.ones(9, 4)}, {}, "differs"),
        ({"proj.lora_A.weight": torch.zeros(2, 4)}, {}, "not PEFT's"),
        ({f"{PREFIX}norm.weight": torch.ones(4)}, {"modules_to_save": ["norm"]}, "LayerNorm"),
        ({f"{PREFIX}lm_head.weight": torch.ones(9, 4)}, {"modules_to_save": ["lm_head"]}, "another model"),
        ({f"{PREFIX}embed.weight": torch.ones(9, 4)}, {"modules_to_save": ["embed"]}, "another model"),
        ({f"{PREFIX}lm_head.weight": torch.ones(7, 4)}, {"modules_to_save": ["head2"]}, "not a part of a LoRA adapter"),
        (
            {**pair("lm_head", 4, 7), f"{PREFIX}lm_head.weight": torch.ones(7, 4)},
            {"modules_to_save": ["head"]},
            "whole",
        ),
        ({f"{PREFIX}embed.token_adapter.trainable_tokens_delta": torch.ones(2, 4)}, {}, "name 0 tokens"),
        (
            {f"{PREFIX}embed.token_adapter.trainable_tokens_delta": torch.ones(2, 4)},
            {"trainable_token_indices": [1, 7]},
            "the token 7 of embed, and the model has 7",
        ),
        (
            {f"{PREFIX}embed.token_adapter.trainable_tokens_delta": torch.ones(2, 4)},
            {"trainable_token_indices": {"embed": [1, 1]}},
            "twice",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(AdapterRefused, match=reason):
        read(write(tmp_path, tensors, **config))
