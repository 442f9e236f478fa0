"""Writes GGUF files of tiny random models with the writer, the names and the quantizers of the `gguf` package.

The package is an oracle: the product has its own reader, decoders and tables of names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.model_worker.tiny_models import widen

# Bytes of the float16 numbers in blocks that have no quantizer in the package: a random block has small numbers there.
_HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ2_XS": (0,),
    "IQ3_S": (0,),
    "TQ1_0": (52,),
}


class Tokens(NamedTuple):
    """The vocabulary of a file, as its metadata has it."""

    model: str
    texts: list[str]
    kinds: list[int]
    merges: list[str] | None = None
    scores: list[float] | None = None
    pre: str | None = None


def plain_tokens(count: int) -> Tokens:
    """A vocabulary of bytes, and tokens without a text of their own."""
    names = sorted(gguf_bytes().values())
    texts = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *names]
    texts += [f"[PAD{i}]" for i in range(len(texts), count)]
    kinds = [3, 3, 3, *([1] * len(names)), *([5] * count)]
    return Tokens("gpt2", texts[:count], kinds[:count], merges=[], pre="qwen2")


def kinds_of(backend: Tokenizer, count: int) -> list[int]:
    added = backend.get_added_tokens_decoder()
    return [1 if i not in added else 3 if added[i].special else 4 for i in range(count)]


def texts_of(backend: Tokenizer) -> list[str]:
    ids = {token: text for text, token in backend.get_vocab(with_added_tokens=True).items()}
    return [ids[token] for token in range(len(ids))]


def byte_pairs(backend: Tokenizer, pre: str) -> Tokens:
    texts = texts_of(backend)
    merges = json.loads(backend.to_str())["model"]["merges"]
    return Tokens("gpt2", texts, kinds_of(backend, len(texts)), merges=[" ".join(pair) for pair in merges], pre=pre)


def gguf_bytes() -> dict[int, str]:
    """The letter of each byte in byte-level vocabularies."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def random_model(kind: str, config: Mapping[str, Any], seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **config), dtype=torch.float32
        )
        widen(model)
    model.eval()
    return model


def random_blocks(name: str, rows: int, inputs: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Rows of random blocks, whose scales are small numbers."""
    kind = GGMLQuantizationType[name]
    size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows * inputs // size, block_bytes), dtype=np.uint8)
    for first in _HALVES.get(name, ()):
        scales = (random.random(len(blocks)) * 2.0**-9).astype(np.float16)
        blocks[:, first : first + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def write_model(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    kind: str = "F32",
    tokens: Tokens | None = None,
    extra: Mapping[str, NDArray[np.float32]] | None = None,
    template: str = "",
    **more: Any,
) -> PreTrainedModel:
    """Write a model with matrices in blocks of a kind, and give it the weights that they stand for.

    `more` are metadata of the architecture, `extra` further tensors.
    """
    config = model.config
    writer = GGUFWriter(path, architecture)
    write_config(writer, config, more)
    write_tokens(writer, tokens or plain_tokens(config.vocab_size))
    if template:
        writer.add_chat_template(template)
    random = np.random.default_rng(0)
    state = model.state_dict()
    with torch.no_grad():
        for name, weight in state.items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            # Those of gpt-oss lie the other way round.
            turned = architecture == "gpt-oss" and name.endswith(("gate_up_proj", "down_proj"))
            for tensor, rows in _parts(name, weight, architecture, config):
                part = weight[rows].transpose(-1, -2) if turned else weight[rows]
                stored = part.contiguous().numpy()
                if stored.ndim > 1 and len(stored) > 1 and not tensor.endswith(".bias"):
                    meant = torch.from_numpy(_write_matrix(writer, tensor, stored, kind, random))
                    weight[rows] = meant.transpose(-1, -2) if turned else meant
                elif architecture.startswith("gemma"):
                    writer.add_tensor(tensor, stored + 1)
                else:
                    writer.add_tensor(tensor, stored)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def write_config(writer: GGUFWriter, config: Any, more: Mapping[str, Any]) -> None:
    heads = config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // heads)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(float(rope.get("full_attention", rope)["rope_theta"]))
    for key, value in more.items():
        named = f"{writer.arch}.{key}"
        if isinstance(value, str):
            writer.add_string(named, value)
        elif isinstance(value, float):
            writer.add_float32(named, value)
        elif isinstance(value, list):
            writer.add_array(named, value)
        else:
            writer.add_uint32(named, value)


def write_tokens(writer: GGUFWriter, tokens: Tokens) -> None:
    writer.add_tokenizer_model(tokens.model)
    writer.add_token_list(tokens.texts)
    writer.add_token_types(tokens.kinds)
    if tokens.pre is not None:
        writer.add_tokenizer_pre(tokens.pre)
    if tokens.scores is not None:
        writer.add_token_scores(tokens.scores)
    if tokens.merges is not None:
        writer.add_token_merges(tokens.merges)
    if "<|im_end|>" in tokens.texts:
        writer.add_eos_token_id(tokens.texts.index("<|im_end|>"))


def _write_matrix(
    writer: GGUFWriter, name: str, weight: NDArray[np.float32], kind: str, random: np.random.Generator
) -> NDArray[np.float32]:
    """Write a matrix, in float32 where its rows are no whole blocks. Returns what it stands for."""
    wanted = GGMLQuantizationType[kind]
    if kind == "F32" or weight.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0]:
        writer.add_tensor(name, weight)
        return weight
    try:
        blocks = gguf.quantize(weight, wanted)
    except NotImplementedError:
        blocks = random_blocks(kind, int(np.prod(weight.shape[:-1])), weight.shape[-1], random)
        blocks = blocks.reshape(*weight.shape[:-1], -1)
    writer.add_tensor(name, blocks, raw_dtype=wanted)
    decoded: NDArray[np.float32] = gguf.dequantize(blocks, wanted).reshape(weight.shape)
    return decoded


def _parts(name: str, weight: torch.Tensor, architecture: str, config: Any) -> list[tuple[str, Any]]:
    """The tensors of a weight, and the part of it that each has, in the order of the file."""
    known = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], config.num_hidden_layers)
    if architecture == "gpt-oss" and (".experts." in name or name.endswith("sinks")):
        layer, last = name.split(".")[2], name.rpartition(".")[2]
        halves = {"gate": (..., slice(0, None, 2)), "up": (..., slice(1, None, 2))}
        of_experts: dict[str, list[tuple[str, Any]]] = {
            "gate_up_proj": [(f"ffn_{half}_exps.weight", rows) for half, rows in halves.items()],
            "gate_up_proj_bias": [(f"ffn_{half}_exps.bias", rows) for half, rows in halves.items()],
            "down_proj": [("ffn_down_exps.weight", ...)],
            "down_proj_bias": [("ffn_down_exps.bias", ...)],
            "sinks": [("attn_sinks.weight", ...)],
        }
        return [(f"blk.{layer}.{tensor}", rows) for tensor, rows in of_experts[last]]
    if name.endswith("experts.gate_up_proj"):
        half = weight.shape[1] // 2
        base = name.removesuffix("gate_up_proj")
        parts = {"gate_proj": slice(half), "up_proj": slice(half, None)}
        return [(f"{names.get_name(base + part)}.weight", (slice(None), rows)) for part, rows in parts.items()]
    if name.endswith("experts.down_proj"):
        return [(f"{names.get_name(name)}.weight", ...)]
    module, _, last = name.rpartition(".")
    found = f"{names.get_name(module)}.{last}"
    if architecture == "llama" and module.endswith(("q_proj", "k_proj")):
        heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
        # The first and the second half of each head, interleaved.
        order = np.arange(len(weight)).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
        return [(found, torch.from_numpy(order))]
    return [(found, ...)]
