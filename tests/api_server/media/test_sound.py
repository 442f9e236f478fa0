"""Sound files: every container gives the sound that was put in, and hostile ones are refused by a sentence."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable

import av
import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor

from api_server.media.log_mel import log_mel
from api_server.media.sound import SoundRefused, decoded, resampled
from shared.recogniser_files import MelForm
from tests.model_worker.hearing.tiny_whisper import RATE, speech

Sound = NDArray[np.float32]


def by_sndfile(sound: Sound, rate: int, kind: str, form: str | None = None) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, sound, rate, format=kind, subtype=form)
    return out.getvalue()


def by_ffmpeg(sound: Sound, rate: int, kind: str, codec: str) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format=kind) as file:
        stream = file.add_stream(codec, rate=rate, layout="mono")
        size = stream.codec_context.frame_size or 1024
        for number, first in enumerate(range(0, len(sound), size)):
            piece = np.pad(sound[first : first + size], (0, max(0, first + size - len(sound))))
            frame = av.AudioFrame.from_ndarray(piece[None], format="fltp", layout="mono")
            frame.sample_rate = rate
            frame.pts = number * size
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


FORMATS: dict[str, tuple[Callable[[Sound, int], bytes], int]] = {
    "wav": (lambda sound, rate: by_sndfile(sound, rate, "WAV"), 16_000),
    "wav of 8 bits": (lambda sound, rate: by_sndfile(sound, rate, "WAV", "PCM_U8"), 16_000),
    "wav of floats": (lambda sound, rate: by_sndfile(sound, rate, "WAV", "FLOAT"), 22_050),
    "flac": (lambda sound, rate: by_sndfile(sound, rate, "FLAC"), 44_100),
    "mp3": (lambda sound, rate: by_sndfile(sound, rate, "MP3"), 44_100),
    "ogg, vorbis": (lambda sound, rate: by_sndfile(sound, rate, "OGG", "VORBIS"), 32_000),
    "ogg, opus": (lambda sound, rate: by_sndfile(sound, rate, "OGG", "OPUS"), 48_000),
    "m4a": (lambda sound, rate: by_ffmpeg(sound, rate, "mp4", "aac"), 44_100),
    "webm": (lambda sound, rate: by_ffmpeg(sound, rate, "webm", "libopus"), 48_000),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_container_gives_its_sound(name: str) -> None:
    encode, rate = FORMATS[name]
    sound = speech(7, 1.5, rate)
    found = decoded(encode(sound, rate), RATE, 10)
    want = resampled(sound, rate, RATE)
    # Codecs begin with some silence of their own.
    assert abs(len(found) - len(want)) < 0.2 * RATE
    lag = np.correlate(found, want[RATE // 4 : RATE], "valid").argmax()
    part = found[lag : lag + RATE - RATE // 4]
    likeness = np.corrcoef(part, want[RATE // 4 : RATE][: len(part)])[0, 1]
    assert likeness > 0.95


def test_channels_are_mixed() -> None:
    sound = speech(3, 0.5)
    both = np.stack([sound, np.zeros_like(sound)], axis=1)
    found = decoded(by_sndfile(both, RATE, "WAV", "FLOAT"), RATE, 10)
    np.testing.assert_allclose(found, sound / 2, atol=1e-6)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000])
def test_resampling_keeps_tones_and_their_times(rate: int) -> None:
    time = np.arange(int(0.5 * rate)) / rate
    tone = np.sin(2 * np.pi * 700 * time).astype(np.float32)
    found = resampled(tone, rate, RATE)
    assert len(found) == RATE // 2
    want = np.sin(2 * np.pi * 700 * np.arange(RATE // 2) / RATE)
    inner = slice(400, -400)
    np.testing.assert_allclose(found[inner], want[inner], atol=2e-3)


def test_resampling_lets_no_tone_pass_that_does_not_fit() -> None:
    tone = np.sin(2 * np.pi * 15_000 * np.arange(24_000) / 48_000).astype(np.float32)
    assert np.abs(resampled(tone, 48_000, RATE)[400:-400]).max() < 1e-3


def wav_header(rate: int, channels: int, data: bytes) -> bytes:
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * 2, channels * 2, 16)
    size = 4 + 8 + len(form) + 8 + len(data)
    parts = (b"RIFF", struct.pack("<I", size), b"WAVEfmt ", struct.pack("<I", 16), form, b"data")
    return b"".join(parts) + struct.pack("<I", len(data)) + data


SOUND = by_sndfile(np.zeros(16_000, np.float32), RATE, "FLAC")
HOSTILE = {
    "empty": (b"", "is empty"),
    "text": (b"#EXTM3U\nhttp://127.0.0.1/secret\n" * 20, "is no sound file that can be read here"),
    "picture": (b"\x89PNG\r\n\x1a\n" + bytes(200), "is no sound file that can be read here"),
    "cut head": (SOUND[:20], "is damaged or cut off"),
    "zeros behind a head": (b"fLaC" + bytes(1000), "is damaged or cut off"),
    "zeros behind another": (b"\0\0\0\x20ftypM4A " + bytes(1000), "is damaged or cut off"),
    "zeros behind a third": (b"\x1aE\xdf\xa3" + bytes(1000), "is damaged or cut off"),
    "no samples": (wav_header(RATE, 1, b""), "has no sound in it"),
    "no rate": (wav_header(1, 1, bytes(200)), "has 1 samples a second"),
    "many channels": (wav_header(RATE, 1000, bytes(4000)), "has 1000 channels|is damaged"),
    "not finite": (by_sndfile(np.full(100, np.nan, np.float32), RATE, "WAV", "FLOAT"), "not finite numbers"),
    "too long": (by_sndfile(np.zeros(11 * RATE, np.float32), RATE, "FLAC"), "longer than the 10 s that are possible"),
    "too long, by ffmpeg": (by_ffmpeg(np.zeros(11 * RATE, np.float32), RATE, "mp4", "aac"), "longer than the 10 s"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str) -> None:
    data, reason = HOSTILE[name]
    with pytest.raises(SoundRefused, match=reason):
        decoded(data, RATE, 10)


def test_a_file_of_random_bytes_is_refused_whatever_its_head() -> None:
    generator = np.random.default_rng()
    for head in (b"RIFF\0\0\0\0WAVE", b"fLaC", b"OggS", b"ID3", b"\0\0\0\x18ftypM4A ", b"\x1aE\xdf\xa3", b"\xff\xf1"):
        data = head + generator.integers(0, 256, 3000, np.uint8).tobytes()
        # A decoder may find some frames in anything; nothing else may happen.
        try:
            decoded(data, RATE, 10)
        except SoundRefused:
            continue


@pytest.mark.parametrize(("bins", "seconds"), [(80, 3.0), (128, 31.7), (80, 0.01)])
def test_features_are_those_of_transformers(bins: int, seconds: float) -> None:
    sound = speech(5, seconds)
    extractor = WhisperFeatureExtractor(feature_size=bins)
    found = log_mel(sound, MelForm(bins))
    padded = np.pad(sound, (0, max(0, 30 * RATE - len(sound))))
    want = extractor._np_extract_fbank_features(padded[None], "cpu")[0]
    np.testing.assert_allclose(found, want, atol=1e-6)
    by_torch = extractor(
        sound, sampling_rate=RATE, truncation=False, padding="max_length" if seconds < 30 else "longest"
    )
    np.testing.assert_allclose(found, by_torch["input_features"][0], atol=2e-3)
    assert found.dtype == np.float32
