"""The model of the standard benchmarks: a Llama of 135 million random bf16 weights, and others of random weights.

`python -m benchmarks.standard_model DIR [--size tiny]` writes it in Hugging Face form, the same bytes each time;
`tokenyard serve DIR` serves it. Weights are wide enough that greedy text depends on all of its context. The tokenizer
reads text byte by byte; the rest of the vocabulary are made-up words, so that any token the model chooses shows as
text. Speed is all that it is good for.
"""

from __future__ import annotations

import argparse
import itertools
import math
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 49152
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = SPECIAL.index("<|im_end|>")
SIZES: Mapping[str, Mapping[str, Any]] = {
    "135m": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 128,
    },
}
# Sizes that no peer is prepared for. What differs from a Llama with this vocabulary is named.
LARGER: Mapping[str, Mapping[str, Any]] = {
    # The shape of Qwen2.5-0.5B.
    "0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
    },
}
MERGE = ("Ġ", "a")
"""Some readers of the format refuse a tokenizer without any merge."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def standard_model(directory: Path, size: str = "135m") -> Path:
    """Make the model in `directory`, unless it is there already."""
    if not (directory / "tokenizer.json").is_file():
        directory.mkdir(parents=True, exist_ok=True)
        _save_weights(directory, {**SIZES, **LARGER}[size])
        save_tokenizer(directory)
    return directory


def _save_weights(directory: Path, shape: Mapping[str, Any]) -> None:
    config = AutoConfig.for_model(
        **{"model_type": "llama", "vocab_size": VOCABULARY, **shape},
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        bos_token_id=SPECIAL.index("<|im_start|>"),
        eos_token_id=END,
        pad_token_id=END,
    )
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(135)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(random_weights(name, parameter.shape, generator))
    model.tie_weights()
    model.generation_config.do_sample = False
    model.save_pretrained(directory)


def random_weights(
    name: str, shape: torch.Size, generator: torch.Generator, specials: int = len(SPECIAL)
) -> torch.Tensor:
    """Draw the weights of a parameter. The first tokens of the vocabulary are so many special ones."""
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    weights: torch.Tensor = torch.randn(shape, generator=generator)
    if "embed_tokens" not in name:
        return weights * (1.5 / math.sqrt(shape[1:].numel()))
    # Tokens that end the text have logits near zero: greedy text never ends early, whatever a server is asked.
    weights[:specials] *= 0.01
    return weights.mul_(0.25)


def save_tokenizer(
    directory: Path,
    specials: Sequence[str] = SPECIAL,
    chat_template: str = CHAT_TEMPLATE,
    named: Mapping[str, str] | None = None,
    more: Sequence[str] = (),
) -> None:
    """Write a tokenizer whose vocabulary begins with the special tokens, some of which have names.

    It has `more` entries, too, which no text becomes.
    """
    byte_level = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ("Ġ" + "".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=4))
    entries = itertools.islice(itertools.chain(specials, byte_level, ["".join(MERGE)], more, words), VOCABULARY)
    tokenizer = Tokenizer(models.BPE(vocab={entry: index for index, entry in enumerate(entries)}, merges=[MERGE]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    fast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=list(specials),
        chat_template=chat_template,
        model_max_length=8192,
        **({} if named is None else {"extra_special_tokens": dict(named)}),
    ).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.standard_model", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=sorted({*SIZES, *LARGER}), default="135m")
    options = parser.parse_args()
    print(standard_model(options.directory, options.size))


if __name__ == "__main__":
    main()
