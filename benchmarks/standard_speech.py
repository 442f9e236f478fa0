"""The standard models that hear and speak, of random weights: for A1 and A2 of `benchmarks.speech`.

`python -m benchmarks.standard_speech DIR --kind hears` writes a recogniser of Whisper base's shape, of 73 million
weights, whose windows have a hundred tokens each, as speech has. `--kind speaks` writes a model that speaks by tokens:
the Llama of `standard_model.py` with codes in its vocabulary, and a DAC of one codebook, which makes 24,000 samples of
75 codes. `--kind vits` writes a VITS of MMS's shape, of 36 million weights. `--size tiny` is for tests. All speak and
hear nonsense: speed is all that they are good for.
"""

from __future__ import annotations

import argparse
import itertools
import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from benchmarks.standard_model import MERGE, SIZES, random_weights

_TRANSFORMERS: Any = transformers
# Of Whisper's vocabulary: the words, which come first, and the timestamps, which come last.
_WORDS = 50_257
_TIMES = 1501
_TARGETS = 448
# The place of a transcript's end: speech has some three tokens a second.
_END = 104
_LANGUAGES = tuple(LANGUAGES)[:99]
_CONTROLS = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in _LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)
_WHISPERS: Mapping[str, Mapping[str, int]] = {
    "standard": {"d_model": 512, "layers": 6, "heads": 8, "ffn": 2048, "bins": 80},
    "tiny": {"d_model": 32, "layers": 2, "heads": 2, "ffn": 64, "bins": 8},
}
# Seconds that a window has, which is as long as its encoder's positions say.
_SECONDS = {"standard": 30, "tiny": 1}
_DACS: Mapping[str, Mapping[str, Any]] = {
    "standard": {"decoder_hidden_size": 1536, "codebook_size": 1024},
    "tiny": {"decoder_hidden_size": 16, "encoder_hidden_size": 4, "codebook_size": 64},
}
# Tokens of a sentence and its speech, which finds no end: some five seconds.
_LONGEST = 512
_LLAMAS = {"standard": "135m", "tiny": "tiny"}
_VITS: Mapping[str, Mapping[str, Any]] = {
    "standard": {},
    "tiny": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "ffn_dim": 16,
        "flow_size": 16,
        "upsample_initial_channel": 256,
        "depth_separable_num_layers": 1,
        "duration_predictor_filter_channels": 16,
    },
}
_LETTERS = ("_", " ", "'", "-", *string.ascii_lowercase)


def standard_speech(directory: Path, kind: str, size: str = "standard") -> Path:
    """Make the model of a kind in `directory`, unless it is there already."""
    if not (directory / "tokenizer_config.json").is_file():
        directory.mkdir(parents=True, exist_ok=True)
        {"hears": _save_whisper, "speaks": _save_speaker, "vits": _save_vits}[kind](directory, size)
    return directory


def _words() -> itertools.chain[str]:
    """What the vocabulary has beside control tokens: bytes, a merge, and made-up words."""
    made_up = ("Ġ" + "".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=4))
    return itertools.chain(sorted(pre_tokenizers.ByteLevel.alphabet()), ["".join(MERGE)], made_up)


def _backend(words: int) -> Tokenizer:
    """A tokenizer that reads text byte by byte, of so many words."""
    vocabulary = {word: index for index, word in enumerate(itertools.islice(_words(), words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[MERGE]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _draw(model: torch.nn.Module, seed: int) -> None:
    """Draw a model's weights, but for those of normalisations and of positions."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "encoder.embed_positions" in name:
                continue
            parameter.copy_(random_weights(name, parameter.shape, generator, 0))


def _save_whisper(directory: Path, size: str) -> None:
    shape = _WHISPERS[size]
    backend = _backend(_WORDS)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _CONTROLS])
    times = [f"<|{0.02 * i:.2f}|>" for i in range(_TIMES)]
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in times])
    ids: dict[str, Any] = {text: backend.token_to_id(text) for text in _CONTROLS}
    end = ids["<|endoftext|>"]
    config = _TRANSFORMERS.WhisperConfig(
        vocab_size=backend.get_vocab_size(),
        num_mel_bins=shape["bins"],
        d_model=shape["d_model"],
        encoder_layers=shape["layers"],
        decoder_layers=shape["layers"],
        encoder_attention_heads=shape["heads"],
        decoder_attention_heads=shape["heads"],
        encoder_ffn_dim=shape["ffn"],
        decoder_ffn_dim=shape["ffn"],
        max_source_positions=50 * _SECONDS[size],
        max_target_positions=_TARGETS,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=ids["<|startoftranscript|>"],
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = _TRANSFORMERS.WhisperForConditionalGeneration(config)
    _draw(model, 137)
    _end_transcripts(model, end)
    generation: Any = model.generation_config
    # Otherwise transformers drops what is set here when it reads the file.
    generation._from_model_config = False
    generation.no_timestamps_token_id = ids["<|notimestamps|>"]
    generation.prev_sot_token_id = ids["<|startofprev|>"]
    generation.suppress_tokens = [ids[text] for text in _CONTROLS if text not in ("<|endoftext|>", "<|notimestamps|>")]
    generation.begin_suppress_tokens = [end]
    generation.max_initial_timestamp_index = 50
    generation.alignment_heads = [[1, 0], [1, 1]]
    generation.max_length = _TARGETS
    generation.is_multilingual = True
    generation.lang_to_id = {f"<|{code}|>": ids[f"<|{code}|>"] for code in _LANGUAGES}
    generation.task_to_id = {"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]}
    model.eval().save_pretrained(directory)
    _TRANSFORMERS.WhisperFeatureExtractor(feature_size=shape["bins"], chunk_length=_SECONDS[size]).save_pretrained(
        directory
    )
    _save_tokenizer(directory, backend, "<|endoftext|>")
    # The pipeline of transformers asks Whisper's own tokenizer for segments.
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "WhisperTokenizer"}, indent=2))


def _end_transcripts(model: Any, end: int) -> None:
    """Let each transcript be one segment that ends at the same place, as random weights find no end."""
    decoder: Any = model.model.decoder
    words = decoder.embed_tokens.weight
    generator = torch.Generator().manual_seed(141)
    way = torch.randn(words.shape[1], generator=generator)
    with torch.no_grad():
        words[-_TIMES:] *= 0.01
        words[end] = way / way.norm() * words[0].norm()
        decoder.embed_positions.weight[_END:] += 1000 * way / way.norm()


def _save_tokenizer(directory: Path, backend: Tokenizer, end: str) -> None:
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=backend, bos_token=end, eos_token=end, unk_token=end, pad_token=end).save_pretrained(
        directory
    )


def _save_speaker(directory: Path, size: str) -> None:
    codec = _TRANSFORMERS.DacConfig(
        n_codebooks=1,
        sampling_rate=24_000,
        downsampling_ratios=[2, 4, 5, 8],
        upsampling_ratios=[8, 5, 4, 2],
        **_DACS[size],
    )
    backend = _backend(2000)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<|say|>", "<|quiet|>")])
    codes = [f"<|code_{code}|>" for code in range(codec.codebook_size)]
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in codes])
    config = _TRANSFORMERS.LlamaConfig(
        **SIZES[_LLAMAS[size]],
        vocab_size=backend.get_vocab_size(),
        max_position_embeddings=_LONGEST,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=backend.token_to_id("<|quiet|>"),
    )
    model = _TRANSFORMERS.LlamaForCausalLM(config).to(torch.bfloat16)
    _draw(model, 138)
    model.eval().save_pretrained(directory)
    with torch.random.fork_rng():
        torch.manual_seed(139)
        _TRANSFORMERS.DacModel(codec).eval().save_pretrained(directory / "codec")
    given = {
        "codec": "codec",
        "prompt": ["<|say|>", "{text}", "<|say|>"],
        "slots": [[0, "<|code_0|>"]],
        "stop": ["<|quiet|>"],
        "sampling": {"temperature": 0},
    }
    (directory / "speech.json").write_text(json.dumps(given, indent=2))
    _save_tokenizer(directory, backend, "<|quiet|>")


def _save_vits(directory: Path, size: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(140)
        model = _TRANSFORMERS.VitsModel(_TRANSFORMERS.VitsConfig(**{"vocab_size": len(_LETTERS) + 1, **_VITS[size]}))
    model.eval().save_pretrained(directory)
    (directory / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(_LETTERS)}))
    facts = {
        "tokenizer_class": "VitsTokenizer",
        "add_blank": True,
        "normalize": True,
        "phonemize": False,
        "is_uroman": False,
        "language": "eng",
        "pad_token": "_",
        "unk_token": "<unk>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(facts, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.standard_speech", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kind", choices=["hears", "speaks", "vits"], required=True)
    parser.add_argument("--size", choices=["standard", "tiny"], default="standard")
    options = parser.parse_args()
    print(standard_speech(options.directory, options.kind, options.size))


if __name__ == "__main__":
    main()
