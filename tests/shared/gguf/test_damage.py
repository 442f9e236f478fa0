"""A file that lies or ends early gives one sentence that names it, the field and the value, and costs no memory."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.gguf import blocks
from shared.gguf.check import check_gguf
from shared.gguf.format import GgufError
from tests.gguf_models import plain_tokens, random_model, write_model

SIZE: dict[str, Any] = {
    "vocab_size": 262,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    write_model(path, random_model("llama", SIZE), "llama", "Q8_0")
    check_gguf(str(path))
    return path.read_bytes()


def complaint(data: bytes, path: Path) -> str:
    """The one sentence about a file."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(GgufError) as caught:
            check_gguf(str(path))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    return text


def replaced(data: bytes, place: int, form: str, value: int) -> bytes:
    """The file with another number at this byte."""
    return data[:place] + struct.pack(form, value) + data[place + struct.calcsize(form) :]


def entry(data: bytes, name: str) -> int:
    """The byte behind the name of a tensor: its dimensions follow, its type and its offset."""
    return data.rindex(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


def value(data: bytes, key: str) -> int:
    """The byte of a key's value, behind its type."""
    return data.index(struct.pack("<Q", len(key)) + key.encode()) + 12 + len(key)


def test_another_format(tmp_path: Path) -> None:
    assert "begins with b'PK" in complaint(b"PK\x03\x04" + bytes(50), tmp_path / "model.gguf")


def test_a_pointer_of_git(tmp_path: Path) -> None:
    text = complaint(b"version https://git-lfs.github.com/spec/v1\noid", tmp_path / "model.gguf")
    assert "git lfs pull" in text


@pytest.mark.parametrize(("number", "said"), [(1, "version is 1"), (0x03000000, "big-endian")])
def test_versions(number: int, said: str, whole: bytes, tmp_path: Path) -> None:
    assert said in complaint(replaced(whole, 4, "<I", number), tmp_path / "model.gguf")


@pytest.mark.parametrize(("place", "field"), [(8, "the number of tensors"), (16, "the number of metadata entries")])
def test_counts_beyond_the_file(place: int, field: str, whole: bytes, tmp_path: Path) -> None:
    text = complaint(replaced(whole, place, "<Q", 1 << 40), tmp_path / "model.gguf")
    assert f"{field} is {1 << 40}" in text


@pytest.mark.parametrize("length", [1 << 40, (1 << 64) - 1])
def test_lengths_of_arrays_and_texts(length: int, whole: bytes, tmp_path: Path) -> None:
    tokens = value(whole, "tokenizer.ggml.tokens")
    text = complaint(replaced(whole, tokens + 4, "<Q", length), tmp_path / "model.gguf")
    assert "tokenizer.ggml.tokens" in text
    text = complaint(replaced(whole, tokens + 12, "<Q", length), tmp_path / "model.gguf")
    assert "text 0 of tokenizer.ggml.tokens" in text
    text = complaint(replaced(whole, 24, "<Q", length), tmp_path / "model.gguf")
    assert "key 0 of the metadata" in text


def test_dimensions(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    place = entry(whole, "blk.0.ffn_up.weight")
    assert "ends at byte" in complaint(replaced(whole, place + 12, "<Q", 1 << 40), path)
    assert "rows of 32" in complaint(replaced(whole, place + 4, "<Q", 33), path)
    assert "dimensions" in complaint(replaced(whole, place + 12, "<Q", 0), path)
    assert "has 99 dimensions" in complaint(replaced(whole, place, "<I", 99), path)


def test_offsets(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    place = entry(whole, "output_norm.weight") + 16
    for offset in (1 << 40, (1 << 63) + 32):
        assert "output_norm.weight" in complaint(replaced(whole, place, "<Q", offset), path)
    # That of another tensor, and one that is not aligned.
    for offset in (0, 7):
        assert "where it can begin" in complaint(replaced(whole, place, "<Q", offset), path)


def test_types(whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    place = entry(whole, "blk.0.ffn_up.weight") + 20
    assert "is I64" in complaint(replaced(whole, place, "<I", 27), path)
    monkeypatch.setattr(blocks, "find_spec", lambda _: None)
    assert "is IQ2_XXS, which the package gguf decodes: pip install" in complaint(
        replaced(whole, place, "<I", 16), path
    )
    assert "is 4711, which is unknown" in complaint(replaced(whole, place, "<I", 4711), path)
    assert "the type of general.architecture is 77" in complaint(
        replaced(whole, value(whole, "general.architecture") - 4, "<I", 77), path
    )


def test_architectures(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    place = value(whole, "general.architecture") + 8
    other = whole[:place] + b"mamba" + whole[place + 5 :]
    assert "general.architecture is 'mamba'" in complaint(other, path)


def test_sizes_that_no_tensor_has(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for key, field in (
        ("llama.embedding_length", "token_embd.weight"),
        ("llama.feed_forward_length", "blk.0.ffn_down.weight"),
        ("llama.block_count", "llama.block_count"),
        ("llama.attention.head_count", "blk.0.attn_q.weight"),
        ("llama.attention.key_length", "blk.0.attn_q.weight"),
    ):
        assert field in complaint(replaced(whole, value(whole, key), "<I", 1 << 30), path)
    assert "context_length" in complaint(replaced(whole, value(whole, "llama.context_length"), "<I", 0), path)


def test_numbers_of_the_rotation(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = random_model("llama", SIZE)
    for key, number in (("rope.scaling.factor", 1e-30), ("rope.scaling.yarn_beta_fast", 0.0)):
        more: dict[str, Any] = {"rope.scaling.type": "yarn", key: number}
        write_model(path, model, "llama", **more)
        assert f"llama.{key} is" in complaint(path.read_bytes(), path)
    write_model(path, model, "llama", extra={"rope_factors_short.weight": np.ones(8, np.float32)})
    assert "it has no tensor rope_factors_long.weight" in complaint(path.read_bytes(), path)


def test_a_token_of_many_letters(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tokens = plain_tokens(SIZE["vocab_size"])
    for length in (1000, 1001):
        long = tokens._replace(texts=[*tokens.texts[:-1], "x" * length])
        write_model(path, random_model("llama", SIZE), "llama", tokens=long)
        if length == 1000:
            check_gguf(str(path))
    assert "token 261 of tokenizer.ggml.tokens has 1001 letters" in complaint(path.read_bytes(), path)


def test_a_file_that_ends_early(whole: bytes, tmp_path: Path) -> None:
    for length in (10, 30, 300, len(whole) // 2, len(whole) - 100):
        assert "the file is damaged" in complaint(whole[:length], tmp_path / "model.gguf")


@settings(max_examples=300)
@given(data=st.data())
def test_any_byte_may_be_wrong(data: st.DataObject, whole: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing but GgufError comes of a wrong head."""
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    head = whole.index(b"output_norm.weight") + 60
    place = data.draw(st.integers(0, head))
    path.write_bytes(whole[:place] + data.draw(st.binary(min_size=1, max_size=8)) + whole[place + 4 :])
    try:
        check_gguf(str(path))
        said = ""
    except GgufError as error:
        said = str(error)
    assert said.isprintable()
