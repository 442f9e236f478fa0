"""Codecs of speech tokens: windows give what transformers' codec makes of all codes at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import SeamlessM4TFeatureExtractor

from interfaces import ClipContext, CodecContext, CodecFacts, PoolingTask, RequestID
from model_worker.model import ModelRefused
from model_worker.speech.codec import SpeechCodec
from model_worker.speech.load_codec import load_codec
from shared.codec_files import CodecFiles
from shared.speech_tokens import SpeechTokenFiles
from shared.speech_windows import Window, Windows
from tests.model_worker.speech.tiny_speaker import CODES, KINDS, codebooks_of, model_of, tiny_codec, whole_sound

FRAMES = 150


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("codecs")
    return {kind: tiny_codec(root / kind, kind) for kind in KINDS}


def codec_of(folder: Path, encodes: bool = False) -> SpeechCodec:
    files = CodecFiles.read(folder)
    codebooks = codebooks_of(files.kind)
    speech = SpeechTokenFiles(str(folder), files, ("{text}",), codebooks, (0,) * len(codebooks), (0,), {})
    return load_codec(speech, "cpu", 4096, encodes=encodes)


def test_clips_become_the_codes_of_transformers(folders: dict[str, Path], tmp_path: Path) -> None:
    sound = (0.3 * np.random.default_rng(8).standard_normal(5003)).astype(np.float32)
    for kind in ("dac", "mimi"):
        codec = codec_of(folders[kind], encodes=True)
        model = model_of(folders[kind])
        # DAC's extractor fills the last frame up.
        padded = np.pad(sound, (0, -len(sound) % 8 if kind == "dac" else 0))
        with torch.inference_mode():
            wanted = model.encode(torch.from_numpy(padded)[None, None]).audio_codes[0]
        check_codes(codec, sound, wanted.numpy())
    for kind in ("xcodec2", "neucodec"):
        # A frame is as long as two frames of the spectrogram.
        folder = tiny_codec(tmp_path / kind, kind, downsampling_ratios=[4, 80])
        wanted = _by_seamless(folder, kind, sound)
        check_codes(codec_of(folder, encodes=True), sound, wanted)


def _by_seamless(folder: Path, kind: str, sound: NDArray[np.float32]) -> NDArray[np.int64]:
    """The codes of X-Codec 2 or NeuCodec, with the spectrogram of transformers' extractor that wants no torchaudio."""
    around = 160 if kind == "xcodec2" else 0
    padded = np.pad(sound, (0, 1))
    padded = np.pad(padded, (0, -len(padded) % 320))
    extractor = SeamlessM4TFeatureExtractor()
    mel = extractor(np.pad(padded, around), sampling_rate=16_000, return_tensors="pt")["input_features"]
    with torch.inference_mode():
        codes: NDArray[np.int64] = (
            model_of(folder).encode(torch.from_numpy(padded)[None, None], mel).audio_codes[0].numpy()
        )
    return codes


def check_codes(codec: SpeechCodec, sound: NDArray[np.float32], wanted: NDArray[np.int64]) -> None:
    """The codes of a clip come frame by frame, in the order of the speech tokens."""
    assert codec.tasks == {PoolingTask.DECODE_SPEECH, PoolingTask.ENCODE_SPEECH}
    values, lengths = codec.run(ClipContext.of_samples(sound, RequestID("a-clip"), "model"))
    assert lengths.tolist() == [len(values)]
    assert len(np.unique(wanted)) > 3
    np.testing.assert_array_equal(values.reshape(-1, len(codec.codebooks)), wanted[list(codec.codebooks)].T)


def test_a_codec_that_only_decodes_takes_no_clips(folders: dict[str, Path]) -> None:
    with pytest.raises(ModelRefused, match="voice_clips needs one that encodes: leave it out"):
        codec_of(folders["snac"], encodes=True)
    codec = codec_of(folders["dac"])
    assert codec.tasks == {PoolingTask.DECODE_SPEECH}
    with pytest.raises(ValueError, match="start the server with --voice-clips"):
        codec.run(ClipContext.of_samples(np.zeros(9, np.float32), RequestID("a-clip"), "model"))


def random_frames(width: int) -> NDArray[np.int32]:
    return np.random.default_rng(5).integers(0, CODES, (FRAMES, width)).astype(np.int32)


def decoded(codec: SpeechCodec, window: Window) -> NDArray[np.float32]:
    context = CodecContext.of(
        [window.codes],
        PoolingTask.DECODE_SPEECH,
        width=len(codec.codebooks),
        left=window.left,
        right=window.right,
        first_frame=window.first_frame,
    )
    values, lengths = codec.run(context)
    assert lengths.tolist() == [len(values)]
    return values[:, 0]


@pytest.mark.parametrize("kind", ["dac", "mimi", "snac"])
def test_windows_join_to_the_sound_of_all_codes(folders: dict[str, Path], kind: str) -> None:
    codec = codec_of(folders[kind])
    facts = codec.facts
    assert not facts.is_whole
    frames = random_frames(len(codec.codebooks))
    windows = Windows(len(codec.codebooks), facts)
    sounds = []
    for frame in frames:
        windows.add(frame.tolist())
        sounds += [decoded(codec, window) for window in windows.ready()]
    before_the_end = len(sounds)
    sounds += [decoded(codec, window) for window in windows.rest()]
    assert before_the_end > 4
    assert [len(sound) // facts.frame_samples for sound in sounds[:4]] == [2, 4, 8, 16]
    whole = whole_sound(folders[kind], frames, codec.codebooks)
    joined = np.concatenate(sounds)
    assert joined.shape == whole.shape
    assert np.abs(joined - whole).max() < 1e-5 * np.abs(whole).max()


def test_a_window_without_its_surroundings_is_another_sound(folders: dict[str, Path]) -> None:
    codec = codec_of(folders["dac"])
    frames = random_frames(len(codec.codebooks))
    whole = whole_sound(folders["dac"], frames, codec.codebooks)
    alone = decoded(codec, Window(frames[40:44].reshape(-1), 40, 0, 0))
    part = whole[40 * codec.facts.frame_samples :][: len(alone)]
    assert np.abs(alone - part).max() > 1e-3 * np.abs(whole).max()


@pytest.mark.parametrize("kind", ["xcodec2", "neucodec"])
def test_a_codec_that_attends_to_all_codes_decodes_them_at_once(folders: dict[str, Path], kind: str) -> None:
    codec = codec_of(folders[kind])
    assert codec.facts.is_whole
    frames = random_frames(1)
    whole = whole_sound(folders[kind], frames, (0,))
    found = decoded(codec, Window(frames.reshape(-1), 0, 0, 0))
    assert found.shape == whole.shape
    np.testing.assert_allclose(found, whole, atol=1e-6)


def test_rates_and_codebooks_are_read_from_the_files(folders: dict[str, Path]) -> None:
    found = {kind: CodecFiles.read(folder) for kind, folder in folders.items()}
    rates = {kind: files.sample_rate for kind, files in found.items()}
    assert rates == {"dac": 8000, "mimi": 8000, "snac": 8000, "xcodec2": 16_000, "neucodec": 24_000}
    codes = {kind: files.codes_of_frame for kind, files in found.items()}
    assert codes == {"dac": (1, 1, 1, 1), "mimi": (1, 1, 1, 1), "snac": (1, 2, 4), "xcodec2": (1,), "neucodec": (1,)}
    assert {files.codebook_size for files in found.values()} == {CODES}


def test_codes_that_cannot_be_are_refused(folders: dict[str, Path]) -> None:
    codec = codec_of(folders["dac"])
    with pytest.raises(ValueError, match="code 64 is outside of the codebooks: codes are 0 to 63"):
        decoded(codec, Window(np.full(3, CODES, np.int32), 0, 0, 0))
    with pytest.raises(ValueError, match="width must be 3, the codes of a frame, got 2"):
        codec.run(CodecContext.of([[1, 2]], PoolingTask.DECODE_SPEECH, width=2))


def test_weights_that_make_no_sound_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tiny_codec(tmp_path / "silent", "dac")
    weights = load_file(folder / "model.safetensors")
    save_file({name: torch.zeros_like(tensor) for name, tensor in weights.items()}, folder / "model.safetensors")
    with pytest.raises(ModelRefused, match="its codes do not change the samples"):
        codec_of(folder)


def test_a_codec_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    folder = tiny_codec(tmp_path / "broken", "mimi")
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("decoder.layers.0.")}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelRefused, match=r"the codec lacks \d+ of its weights, such as decoder"):
        codec_of(folder)


def test_frames_around_a_window_must_leave_one() -> None:
    with pytest.raises(ValueError, match="lengths must be multiples of the width 2 and at least 6"):
        CodecContext.of([[1, 2, 3, 4]], PoolingTask.DECODE_SPEECH, width=2, left=1, right=1)
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        CodecContext.of([[1]], PoolingTask.DECODE_SPEECH, width=0)
    assert CodecFacts(8000, 8, -1, -1).is_whole
    assert not CodecFacts(8000, 8, 0, 0).is_whole
