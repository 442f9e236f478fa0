"""Random checkpoints of VITS that take milliseconds, and what transformers makes of a sentence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import VitsConfig, VitsModel

LETTERS = ["_", " ", "'", "-", *"abcdefghijklmnopqrstuvwxyz", "é"]
SIZES: dict[str, Any] = {
    "vocab_size": len(LETTERS) + 1,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 32,
    "flow_size": 16,
    "spectrogram_bins": 9,
    "upsample_initial_channel": 16,
    "upsample_rates": [4, 4],
    "upsample_kernel_sizes": [8, 8],
    "resblock_kernel_sizes": [3],
    "resblock_dilation_sizes": [[1, 3]],
    "prior_encoder_num_flows": 2,
    "prior_encoder_num_wavenet_layers": 2,
    "posterior_encoder_num_wavenet_layers": 2,
    "duration_predictor_filter_channels": 16,
    "duration_predictor_num_flows": 2,
    "depth_separable_num_layers": 2,
    "sampling_rate": 8000,
}
TOKENIZER: dict[str, Any] = {
    "tokenizer_class": "VitsTokenizer",
    "add_blank": True,
    "normalize": True,
    "phonemize": False,
    "is_uroman": False,
    "language": "eng",
    "pad_token": "_",
    "unk_token": "<unk>",
}


def files_of(folder: Path, tokenizer: dict[str, Any] | None = None, **config: Any) -> Path:
    """The files beside the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"architectures": ["VitsModel"], **VitsConfig(**(SIZES | config)).to_dict()}
    (folder / "config.json").write_text(json.dumps(facts))
    (folder / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(LETTERS)}))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER | (tokenizer or {})))
    return folder


def tiny_vits(folder: Path, seed: int = 0, **config: Any) -> Path:
    """A checkpoint with its tokenizer's files. Its last layer is small, so that samples are not all 1 or -1."""
    torch.manual_seed(seed)
    made = VitsModel(VitsConfig(**(SIZES | config))).eval()
    with torch.no_grad():
        made.decoder.conv_post.weight *= 0.02
    made.save_pretrained(folder)
    files_of(folder, **config)
    return folder


class Reference:
    """transformers' own model."""

    def __init__(self, folder: Path) -> None:
        auto: Any = VitsModel
        self.model = auto.from_pretrained(folder, dtype=torch.float32).eval()

    def samples(
        self, ids: Sequence[int], seed: int, speed: float = 1.0, voice: int | None = None
    ) -> NDArray[np.float32]:
        """The samples after `torch.manual_seed`, which changes the generator of the whole process."""
        with torch.inference_mode():
            torch.manual_seed(seed)
            rate = self.model.config.speaking_rate * speed
            tokens = torch.tensor([list(ids)])
            found = self.model(tokens, speaker_id=voice, speaking_rate=rate).waveform[0].numpy()
        samples: NDArray[np.float32] = found
        return samples
