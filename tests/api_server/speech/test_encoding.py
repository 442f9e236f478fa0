"""Files of sound, read again by libraries that did not write them."""

from __future__ import annotations

import importlib.util
import io
import wave
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from api_server.errors import ErrorKind, RequestFailed
from api_server.speech.encoding import FORMATS, Encoder, Format, rate_of, to_int16

RATE = 16_000
# Samples that coders add before and after the sound.
PADDING = 0.2


def tone(seconds: float) -> NDArray[np.float32]:
    """A tone that grows and fades, as its ends would else be clicks."""
    time = np.arange(int(seconds * RATE)) / RATE
    return (0.4 * np.sin(2 * np.pi * 440 * time) * np.sin(np.pi * time / seconds)).astype(np.float32)


def read(data: bytes) -> tuple[NDArray[np.float32], int]:
    """What ffmpeg reads."""
    opened: Any = av.open(io.BytesIO(data))
    with opened as container:
        frames = [frame.to_ndarray()[0] for frame in container.decode(audio=0)]
        rate = container.streams.audio[0].rate
    samples = np.concatenate(frames)
    return (samples / 32768 if samples.dtype == np.int16 else samples).astype(np.float32), rate


def loudest_tone(samples: NDArray[np.float32], rate: int) -> float:
    """The frequency of the loudest tone in Hz."""
    return float(np.abs(np.fft.rfft(samples)).argmax() * rate / len(samples))


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "pcm"])
@pytest.mark.parametrize("streamed", [False, True])
def test_ffmpeg_reads_the_sound(kind: Format, streamed: bool) -> None:
    samples = tone(2.0)
    encoder = Encoder(kind, RATE, rate_of(kind, RATE, None))
    if streamed:
        data = b"".join([*(encoder.part(piece) for piece in np.split(samples, [100, 9000])), encoder.rest()])
    else:
        data = encoder.whole(samples)
    found, rate = read(data)
    assert len(found) / rate == pytest.approx(2.0, abs=PADDING)
    assert loudest_tone(found, rate) == pytest.approx(440, abs=2)
    assert np.abs(found).max() == pytest.approx(0.4, abs=0.1)


@pytest.mark.parametrize("kind", ["mp3", "flac"])
def test_parts_leave_before_the_end(kind: Format) -> None:
    encoder = Encoder(kind, RATE, RATE)
    assert len(encoder.part(tone(2.0))) > 1000
    assert len(encoder.part(tone(2.0))) > 1000


def test_a_whole_wav_has_its_length_and_the_samples_of_pcm() -> None:
    samples = tone(0.5)
    with wave.open(io.BytesIO(Encoder("wav", RATE, RATE).whole(samples))) as file:
        assert (file.getnframes(), file.getframerate(), file.getnchannels(), file.getsampwidth()) == (8000, RATE, 1, 2)
        frames = file.readframes(8000)
    assert frames == to_int16(samples).tobytes() == Encoder("pcm", RATE, RATE).whole(samples)


def test_flac_loses_nothing() -> None:
    samples = tone(0.5)
    found, _ = read(Encoder("flac", RATE, RATE).whole(samples))
    np.testing.assert_array_equal(np.rint(found * 32768).astype(np.int16), to_int16(samples))


def test_samples_beyond_one_are_cut() -> None:
    assert to_int16(np.array([2.0, -2.0, 1.0, 0.0], np.float32)).tolist() == [32767, -32768, 32767, 0]


def test_rates() -> None:
    assert rate_of("pcm", 16_000, None) == 24_000
    assert rate_of("wav", 22_050, None) == 22_050
    assert rate_of("opus", 22_050, None) == 24_000
    assert rate_of("mp3", 12_345, None) == 24_000
    assert rate_of("pcm", 22_050, 8_000) == 8_000
    with pytest.raises(RequestFailed, match="sample_rate must be one of 8000, 12000, 16000, 24000, 48000"):
        rate_of("opus", 16_000, 44_100)


def test_a_library_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    extras: dict[Format, str] = {"mp3": "audio", "aac": "video"}
    for kind, extra in extras.items():
        with pytest.raises(RequestFailed, match=rf"tokenyard\[{extra}\]") as failed:
            Encoder(kind, RATE, RATE)
        assert failed.value.kind is ErrorKind.UNSUPPORTED
        assert failed.value.field == "response_format"
    Encoder("wav", RATE, RATE)
