"""SNAC's decoder: samples that SNAC's own package (snac 1.2.1) makes of the same weights, and its noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from model_worker.speech.load_codec import load_codec
from model_worker.speech.snac import SnacDecoder, frame_noise, plain_weights
from shared.codec_files import CodecFiles
from shared.speech_tokens import SpeechTokenFiles
from tests.model_worker.speech.tiny_speaker import CODES, SNAC_CODEBOOKS, snac_config, snac_weights, tiny_codec

# Every 24th sample of the package's `SNAC.decode`. For the one with noise, its torch.randn gave `frame_noise`.
_PLAIN = [
    [-0.07841, -0.10899, -0.10532, -0.10368, -0.10461, -0.10876, -0.10929, -0.10543, -0.10446, -0.10764, -0.10984],
    [0.0191, 0.09874, 0.0249, 0.06803, 0.06957, 0.05626, 0.04495, 0.04814, 0.06847, 0.02639, -0.00061],
]
_NOISY = [0.05097, -0.13027, -0.0794, -0.14775, -0.12892, -0.15831, -0.17595, -0.17617, -0.19001, -0.08344, -0.22871]


@pytest.mark.parametrize(
    ("noise", "depthwise", "expected"), [(False, True, _PLAIN[0]), (False, False, _PLAIN[1]), (True, True, _NOISY)]
)
def test_samples_are_those_of_the_package(noise: bool, depthwise: bool, expected: list[float]) -> None:
    config = snac_config(noise=noise, depthwise=depthwise)
    decoder = SnacDecoder(config).eval()
    decoder.load_state_dict(plain_weights(snac_weights(config)))
    codes = [torch.arange(3 * count) * 7 % CODES for count in (1, 2, 4)]
    with torch.inference_mode():
        sound = decoder.decode(codes, 0)
    assert sound.shape == (288,)
    np.testing.assert_allclose(sound[: 24 * len(expected) : 24].numpy(), expected, atol=2e-5)


def test_noise_follows_from_its_place() -> None:
    whole = frame_noise(1, 0, 60, 4)
    assert torch.equal(whole[20:40], frame_noise(1, 5, 20, 4))
    assert not torch.equal(whole, frame_noise(2, 0, 60, 4))
    assert 0.5 < float(whole.std()) < 1.5


def test_weights_of_both_forms_and_in_both_files(tmp_path: Path) -> None:
    """A length and a direction under their older names, in a file of safetensors, give the same sound."""
    stored = snac_weights(snac_config())
    renamed = {
        name.replace(".parametrizations.weight.original0", ".weight_g").replace(
            ".parametrizations.weight.original1", ".weight_v"
        ): tensor
        for name, tensor in stored.items()
    }
    assert renamed.keys() != stored.keys()
    pickled = tiny_codec(tmp_path / "pickled", "snac")
    plain = tiny_codec(tmp_path / "plain", "snac")
    (plain / "pytorch_model.bin").unlink()
    save_file(renamed, plain / "model.safetensors")
    frames = np.random.default_rng(0).integers(0, CODES, (6, len(SNAC_CODEBOOKS)))
    sounds = []
    for folder in (pickled, plain):
        files = CodecFiles.read(folder)
        speech = SpeechTokenFiles(str(folder), files, ("{text}",), SNAC_CODEBOOKS, (0,) * 7, (0,), {})
        sounds.append(load_codec(speech, "cpu", 4096)._samples(frames))
    np.testing.assert_array_equal(sounds[0], sounds[1])


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    folder = tiny_codec(tmp_path / "snac", "snac")
    speech = SpeechTokenFiles(str(folder), CodecFiles.read(folder), ("{text}",), SNAC_CODEBOOKS, (0,) * 7, (0,), {})
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor pytorch_model\.bin: copy it again"):
        load_codec(speech, "cpu", 4096)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'echo ran'\ntR.")
    with pytest.raises(ValueError, match="snac cannot be served"):
        load_codec(speech, "cpu", 4096)
    with pytest.raises(ValueError, match="a SNAC with attention"):
        SnacDecoder(snac_config(attn_window_size=32))
