"""Tiny random models that generate speech tokens, with their codecs, and what transformers makes of a text."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from model_worker.speech.snac import SnacDecoder, plain_weights
from tests.api_server.conftest import byte_level_backend
from tests.model_worker.tiny_models import widen

RATE = 8000
CODES = 64
# Codes of a frame. The order of their codebooks is not that of the codec.
CODEBOOKS = (0, 2, 1)
# Of SNAC, whose frame has more codes of its finer codebooks, as Orpheus orders them.
SNAC_CODEBOOKS = (0, 1, 2, 2, 1, 2, 2)
_WAV2VEC: dict[str, Any] = {
    "model_type": "wav2vec2-bert",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "feature_projection_input_dim": 160,
    "output_hidden_size": 16,
}
_ATTENDING: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "encoder_hidden_size": 4,
    "downsampling_ratios": [2, 4],
    "quantization_dim": 80,
    "quantization_levels": [4, 4, 4],
    "semantic_model_config": _WAV2VEC,
}
_CODECS: dict[str, dict[str, Any]] = {
    "dac": {
        "encoder_hidden_size": 4,
        "downsampling_ratios": [2, 4],
        "decoder_hidden_size": 16,
        "n_codebooks": 4,
        "codebook_size": CODES,
        "codebook_dim": 4,
        "upsampling_ratios": [4, 2],
        "sampling_rate": RATE,
    },
    "mimi": {
        "sampling_rate": RATE,
        "hidden_size": 16,
        "num_filters": 4,
        "upsampling_ratios": [4, 2],
        "codebook_size": CODES,
        "codebook_dim": 8,
        "vector_quantization_hidden_dimension": 8,
        "num_quantizers": 4,
        "num_semantic_quantizers": 1,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 8,
        "upsample_groups": 16,
    },
    "snac": {
        "sampling_rate": RATE,
        "encoder_dim": 4,
        "encoder_rates": [2, 4],
        "decoder_dim": 16,
        "decoder_rates": [4, 2, 3],
        "attn_window_size": None,
        "codebook_size": CODES,
        "codebook_dim": 4,
        "vq_strides": [4, 2, 1],
        "noise": True,
        "depthwise": True,
    },
    "xcodec2": _ATTENDING,
    "neucodec": _ATTENDING,
}
KINDS = tuple(_CODECS)
_CLASSES = {"dac": "DacModel", "mimi": "MimiModel", "xcodec2": "Xcodec2Model", "neucodec": "NeuCodecModel"}


def codebooks_of(kind: str) -> tuple[int, ...]:
    """The codebook of each code of a frame."""
    return {"snac": SNAC_CODEBOOKS, "dac": CODEBOOKS, "mimi": CODEBOOKS}.get(kind, (0,))


def snac_config(**fields: Any) -> dict[str, Any]:
    return _CODECS["snac"] | fields


def snac_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights under the names of SNAC's own package: those of convolutions as a length and a direction."""
    generator = np.random.default_rng(seed)
    found: dict[str, torch.Tensor] = {}
    for name, parameter in SnacDecoder(config).state_dict().items():
        drawn = torch.from_numpy(generator.standard_normal(parameter.shape).astype(np.float32))
        base = name.removesuffix(".weight")
        if name.endswith("alpha"):
            found[name] = 1.0 + 0.2 * drawn
        elif name.endswith(".bias"):
            found[name] = 0.1 * drawn
        elif base.endswith("codebook"):
            found[name] = drawn
        else:
            found[f"{base}.parametrizations.weight.original0"] = torch.full(
                (len(drawn), *(1,) * (drawn.dim() - 1)), 0.5
            )
            found[f"{base}.parametrizations.weight.original1"] = drawn
    return found


def tiny_codec(folder: Path, kind: str, seed: int = 0, **fields: Any) -> Path:
    """Write a codec whose sound changes with its codes. Returns its folder."""
    if kind == "snac":
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(snac_config()))
        torch.save(snac_weights(snac_config(), seed), folder / "pytorch_model.bin")
        return folder
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = _class_of(kind)(AutoConfig.for_model(kind, **(_CODECS[kind] | fields)))
        for name, buffer in model.named_buffers():
            # The entries of Mimi's codebooks, which are zeros at first.
            if name.endswith("embed_sum"):
                buffer.normal_()
            elif name.endswith("cluster_usage"):
                buffer.fill_(1.0)
        for name, parameter in model.named_parameters():
            # So that different sounds have different codes.
            if name.startswith(("fc_encoder.", "acoustic_encoder.", "semantic_adapter.")) and parameter.dim() > 1:
                parameter.data.normal_(0, 3 / parameter[0].numel() ** 0.5)
    model.eval().save_pretrained(folder)
    return folder


def whole_sound(folder: Path, frames: NDArray[np.integer], codebooks: tuple[int, ...]) -> NDArray[np.float32]:
    """What transformers' codec makes of all frames [frames, codes] at once; of SNAC, what our decoder does."""
    config = json.loads((folder / "config.json").read_text())
    if "model_type" not in config:
        return _whole_snac(folder, config, frames, codebooks)
    model = model_of(folder)
    codes = np.empty((1, len(codebooks), len(frames)), np.int64)
    codes[0, list(codebooks)] = frames.T
    with torch.inference_mode():
        sound: NDArray[np.float32] = model.decode(audio_codes=torch.from_numpy(codes)).audio_values.reshape(-1).numpy()
    return sound


def _whole_snac(
    folder: Path, config: dict[str, Any], frames: NDArray[np.integer], codebooks: tuple[int, ...]
) -> NDArray[np.float32]:
    decoder = SnacDecoder(config).eval()
    decoder.load_state_dict(plain_weights(torch.load(folder / "pytorch_model.bin", weights_only=True)))
    places = np.array(codebooks)
    codes = [torch.from_numpy(frames[:, places == book].reshape(-1).astype(np.int64)) for book in range(3)]
    with torch.inference_mode():
        sound: NDArray[np.float32] = decoder.decode(codes, 0).numpy()
    return sound


def tiny_speaker(folder: Path, kind: str = "dac", length: int = 256, seed: int = 3, **fields: Any) -> Path:
    """Write a model that generates speech tokens, greedily if `fields` do not say otherwise. Returns its folder.

    `fields` replace those of speech.json.
    """
    codebooks = codebooks_of(kind)
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<|say|>", "<|quiet|>")])
    names = [f"<|c{place}_{code}|>" for place in range(len(codebooks)) for code in range(CODES)]
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    config = LlamaConfig(
        vocab_size=backend.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=backend.token_to_id("<|quiet|>"),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        widen(model)
    model.eval().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|quiet|>").save_pretrained(folder)
    tiny_codec(folder / "codec", kind)
    given: dict[str, Any] = {
        "codec": "codec",
        "prompt": ["<|say|>", "{voice}: {text}", "<|say|>"],
        "slots": [[book, f"<|c{place}_0|>"] for place, book in enumerate(codebooks)],
        "stop": ["<|quiet|>"],
        "voices": ["Ada", "Bob"],
        "sampling": {"temperature": 0},
        "characters": 60,
    }
    (folder / "speech.json").write_text(json.dumps(given | fields))
    return folder


class SpeakerJudge:
    """transformers' own model, held to the order of speech tokens by its own hook."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._given = json.loads((folder / "speech.json").read_text())
        self._codebooks = tuple(slot[0] for slot in self._given["slots"])
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        auto: Any = AutoModelForCausalLM
        self._model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        self._known: dict[tuple[str, str], NDArray[np.int64]] = {}
        self._zeros = [self._id(slot[1]) for slot in self._given["slots"]]
        self._end = self._id(self._given["stop"][0])

    def prompt(self, text: str, voice: str = "Ada") -> list[int]:
        parts = [part.replace("{voice}", voice).replace("{text}", text) for part in self._given["prompt"]]
        return [token for part in parts for token in self._tokenizer(part, add_special_tokens=False).input_ids]

    def frames(self, text: str, voice: str = "Ada") -> NDArray[np.int64]:
        """The codes of a part of a text: [frames, codes]."""
        if (text, voice) not in self._known:
            self._known[text, voice] = self._generated(text, voice)
        return self._known[text, voice]

    def _generated(self, text: str, voice: str, heard: Sequence[int] = ()) -> NDArray[np.int64]:
        """The codes that follow a prompt, behind the tokens `heard`."""
        prompt = [*self.prompt(text, voice), *heard]
        width = len(self._zeros)

        def allowed(_: int, tokens: torch.Tensor) -> list[int]:
            count = len(tokens) - len(prompt)
            zero = self._zeros[count % width]
            ends = [self._end] if count and not count % width else []
            return [*range(zero, zero + CODES), *ends]

        with torch.inference_mode():
            found = self._model.generate(
                torch.tensor([prompt]),
                do_sample=False,
                max_length=self._model.config.max_position_embeddings,
                prefix_allowed_tokens_fn=allowed,
                eos_token_id=self._end,
                pad_token_id=self._end,
            )[0, len(prompt) :].numpy()
        found = found[found != self._end]
        frames: NDArray[np.int64] = found[: len(found) // width * width].reshape(-1, width) - np.array(self._zeros)
        return frames

    def sound(self, *parts: str, voice: str = "Ada") -> NDArray[np.float32]:
        """The samples of all parts of a text, whose codes are decoded at once."""
        frames = np.concatenate([self.frames(part, voice) for part in parts])
        return whole_sound(self._folder / "codec", frames, self._codebooks)

    def imitated(self, text: str, clip: NDArray[np.float32], transcript: str) -> NDArray[np.float32]:
        """The samples of a part of a text, whose model goes on from a clip's codes. The codec is DAC."""
        codec = model_of(self._folder / "codec")
        padded = np.pad(clip, (0, -len(clip) % codec.config.hop_length))
        with torch.inference_mode():
            books = codec.encode(torch.from_numpy(padded)[None, None]).audio_codes[0].numpy()
        heard = books[list(self._codebooks)].T
        voice = [int(token) for token in (heard + np.array(self._zeros)).reshape(-1)]
        frames = self._generated(f"{transcript} {text}", "Ada", voice)
        sound = whole_sound(self._folder / "codec", np.concatenate([heard, frames]), self._codebooks)
        return sound[len(heard) * codec.config.hop_length :]

    def _id(self, token: str) -> int:
        found = self._tokenizer.convert_tokens_to_ids(token)
        assert isinstance(found, int)
        return found


def model_of(folder: Path) -> Any:
    """transformers' own codec."""
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    return _class_of(kind).from_pretrained(folder, dtype=torch.float32).eval()


def _class_of(kind: str) -> Any:
    return getattr(importlib.import_module("transformers"), _CLASSES[kind])
