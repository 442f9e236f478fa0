"""Tokenizers of GGUF files give the tokens of the tokenizers that the files were made of."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from api_server.text.model_files import read_generation_config
from deploy.embedded_model import EMBEDDED_MODEL_PATH
from shared.gguf.file import open_gguf
from shared.gguf.format import GgufError
from shared.gguf.splits import SPLITS
from shared.gguf.tokenizer import check_tokenizer, tokenizer_of
from shared.tokenizer_files import load_tokenizer
from tests.gguf_models import Tokens, byte_pairs, kinds_of, texts_of, write_tokens

EMBEDDED = Path(EMBEDDED_MODEL_PATH)
WORDS = [
    "hello",
    "World",
    "def f(x):",
    "  return",
    "日本語",
    "Straße",
    "naïve",
    "١٢٣",
    "don't",
    "I'LL",
    "a_b",
    "e\u0301",
]
GAPS = [" ", "  ", "\n", "\r\n", "\n\n\n", "\t", "", "...", "12345", "🙂", "▁", "<s>", "<|im_start|>", "<tool_call>"]


def fresh_texts(count: int) -> list[str]:
    """Random texts of words, gaps, marks and any letters."""
    chosen = random.Random(random.getrandbits(64))

    def part() -> str:
        kind = chosen.random()
        if kind < 0.4:
            return chosen.choice(WORDS)
        if kind < 0.8:
            return chosen.choice(GAPS)
        return chr(chosen.choice([chosen.randrange(32, 127), chosen.randrange(0xA1, 0xD7FF)]))

    return ["".join(part() for _ in range(chosen.randrange(1, 40))) for _ in range(count)]


def write(path: Path, tokens: Tokens, architecture: str = "llama", **more: Any) -> Path:
    writer = GGUFWriter(path, architecture)
    write_tokens(writer, tokens)
    for key, value in more.items():
        named = f"tokenizer.{key}" if key.startswith("chat") else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(named, value)
        elif isinstance(value, str):
            writer.add_string(named, value)
        elif isinstance(value, list):
            writer.add_array(named, value)
        else:
            writer.add_uint32(named, value)
    writer.add_tensor("token_embd.weight", np.zeros((1, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def compare(found: Tokenizer, wanted: Tokenizer, add_special_tokens: bool = False) -> None:
    for text in fresh_texts(300):
        ids = wanted.encode(text, add_special_tokens=add_special_tokens).ids
        assert found.encode(text, add_special_tokens=add_special_tokens).ids == ids, text
        assert found.decode(ids, skip_special_tokens=False) == wanted.decode(ids, skip_special_tokens=False), text
        assert found.decode(ids) == wanted.decode(ids), text


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-4o", "tekken", "gpt-2", "smollm", "deepseek-v3"])
def test_byte_pairs(pre: str, tmp_path: Path) -> None:
    """The embedded model's merges with the splits of others."""
    wanted = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    wanted.no_truncation()
    path = write(tmp_path / "m.gguf", byte_pairs(wanted, pre))
    if pre in ("gpt-2", "smollm"):
        splits: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        if pre == "smollm":
            splits.insert(0, pre_tokenizers.Digits(individual_digits=True))
    else:
        patterns = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre].patterns]
        splits = [*patterns, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    wanted.pre_tokenizer = pre_tokenizers.Sequence(splits)
    if pre == "qwen2":
        wanted.normalizer = normalizers.NFC()
    if SPLITS[pre].ignores_merges:
        wanted.model.ignore_merges = True
    compare(tokenizer_of(open_gguf(path)).backend, wanted)


def sentencepiece(prefix: bool, added: list[AddedToken]) -> Tokenizer:
    """A tokenizer as transformers converts those of sentencepiece, trained on some words."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if prefix else decoding)
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=names, show_progress=False)
    chosen = random.Random(5)
    texts = [" ".join(chosen.choices([*WORDS, "a", "  b", "hel", "lo"], k=9)) for _ in range(300)]
    backend.train_from_iterator(texts, trainer)
    state = json.loads(backend.to_str())
    # Bytes are no special tokens, but ordinary ones that stand for letters without a token.
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < 3]
    backend = Tokenizer.from_str(json.dumps(state))
    backend.add_tokens(added)
    return backend


def scored(backend: Tokenizer) -> Tokens:
    """Scores in the order of the merges, as sentencepiece has them."""
    texts = texts_of(backend)
    ranks: dict[str, int] = {}
    for number, (left, right) in enumerate(json.loads(backend.to_str())["model"]["merges"]):
        ranks.setdefault(left + right, number + 1)
    kinds = kinds_of(backend, len(texts))
    kinds = [2 if text == "<unk>" else 6 if text.startswith("<0x") else kinds[i] for i, text in enumerate(texts)]
    return Tokens("llama", texts, kinds, scores=[-float(ranks.get(text, 0)) for text in texts])


def test_sentencepiece(tmp_path: Path) -> None:
    wanted = sentencepiece(True, [AddedToken("<tool_call>", normalized=False)])
    path = write(tmp_path / "m.gguf", scored(wanted), unknown_token_id=0, bos_token_id=1, eos_token_id=2)
    found = tokenizer_of(open_gguf(path)).backend
    compare(found, wanted)
    assert found.encode("hello").ids[0] == 1
    without = write(tmp_path / "n.gguf", scored(wanted), unknown_token_id=0, bos_token_id=1, add_bos_token=False)
    assert tokenizer_of(open_gguf(without)).backend.encode("hello").ids[0] != 1


def test_sentencepiece_of_gemma(tmp_path: Path) -> None:
    """No space is put before a text; runs of spaces are in the file as spaces."""
    wanted = sentencepiece(False, [])
    tokens = scored(wanted)
    runs = [i for i, text in enumerate(tokens.texts) if len(text) > 1 and not text.strip("▁")]
    for i in runs:
        tokens.texts[i] = " " * len(tokens.texts[i])
        tokens.kinds[i] = 4
    path = write(tmp_path / "m.gguf", tokens, "gemma3", unknown_token_id=0, bos_token_id=1)
    compare(tokenizer_of(open_gguf(path)).backend, wanted)


def test_phi_3_strips_what_follows_its_marks(tmp_path: Path) -> None:
    wanted = sentencepiece(True, [AddedToken("<|user|>", normalized=False, special=True, rstrip=True)])
    path = write(tmp_path / "m.gguf", scored(wanted), "phi3", unknown_token_id=0, bos_token_id=1)
    found = tokenizer_of(open_gguf(path)).backend
    text = "<|user|>\n  hello <|user|> World"
    assert found.encode(text, add_special_tokens=False).ids == wanted.encode(text, add_special_tokens=False).ids


def test_ends_template_and_special_tokens(tmp_path: Path) -> None:
    backend = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    template = (EMBEDDED / "chat_template.jinja").read_text()
    path = write(tmp_path / "m.gguf", byte_pairs(backend, "qwen2"), chat_template=template, eot_token_id=0)
    loaded = load_tokenizer(str(path))
    assert read_generation_config(str(path)) == {"eos_token_id": [2, 0]}
    assert (loaded.eos_token, loaded.bos_token) == ("<|im_end|>", None)
    original = load_tokenizer(str(EMBEDDED))
    messages = [{"role": "user", "content": "Hello"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == original.apply_chat_template(
        messages, tokenize=False
    )
    assert len(loaded) == len(original)


def test_several_templates(tmp_path: Path) -> None:
    backend = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    more: dict[str, Any] = {"chat_template": "A", "chat_templates": ["tool_use"], "chat_template.tool_use": "B"}
    path = write(tmp_path / "m.gguf", byte_pairs(backend, "qwen2"), **more)
    assert tokenizer_of(open_gguf(path)).chat_template == {"default": "A", "tool_use": "B"}


def test_unused_rows_behind_the_vocabulary_are_no_tokens(tmp_path: Path) -> None:
    tokens = byte_pairs(Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")), "qwen2")
    count = len(tokens.texts)
    tokens.texts.extend(["[PAD1]", "[PAD2]"])
    tokens.kinds.extend([5, 5])
    found = tokenizer_of(open_gguf(write(tmp_path / "m.gguf", tokens))).backend
    assert found.get_vocab_size() == count


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"pre": "new-split"}, "tokenizer.ggml.pre is 'new-split'"),
        ({"merges": ["ab"]}, "entry 0 of tokenizer.ggml.merges is 'ab'"),
        ({"merges": ["a zzzz"]}, "make no tokenizer"),
        ({"kinds": [1]}, "tokenizer.ggml.token_type"),
        ({"model": "llama", "scores": [1.0]}, "tokenizer.ggml.scores"),
        ({"texts": []}, "tokenizer.ggml.tokens"),
    ],
)
def test_what_makes_no_tokenizer_is_named(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    tokens = Tokens("gpt2", ["a", "b", "ab"], [1, 1, 1], merges=["a b"], pre="qwen2")._replace(**change)
    path = write(tmp_path / "m.gguf", tokens)
    with pytest.raises(GgufError, match=said.replace(".", r"\.")):
        tokenizer_of(open_gguf(path))


def test_a_special_token_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    tokens = Tokens("gpt2", ["a", "b", "ab"], [1, 1, 1], merges=["a b"], pre="qwen2")
    with pytest.raises(GgufError, match=r"tokenizer\.ggml\.eos_token_id is int 99"):
        check_tokenizer(open_gguf(write(tmp_path / "m.gguf", tokens, eos_token_id=99)))
