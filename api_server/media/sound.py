"""Turns the bytes of a sound file into samples of one channel. Runs in the media process only.

Knows libsndfile (package soundfile) and ffmpeg (package av), which an extra brings along, and what of them must not
meet the bytes of strangers: a file is opened as what its own first bytes say, and names no other file. Knows no model.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from api_server.media.decode import reason

Samples = NDArray[np.float32]

FORMATS = "WAV, FLAC, MP3, OGG, M4A or WebM"
# Rates that a file may have, in samples for each second.
_LEAST_RATE = 1000
_MOST_RATE = 384_000
_MOST_CHANNELS = 32
# Samples of each channel that are decoded at a time.
_PIECE = 1 << 18
# Half the width of the resampling filter, in zero crossings, and the form of its window.
_CROSSINGS = 24
_BETA = 9.0

_SNDFILE = "soundfile"
# The package that reads a container, ffmpeg's name for it, and the bytes that it has at a place.
_CONTAINERS = (
    (8, b"WAVE", _SNDFILE),
    (0, b"fLaC", _SNDFILE),
    (0, b"OggS", _SNDFILE),
    (0, b"ID3", _SNDFILE),
    (4, b"ftyp", "mov"),
    (0, b"\x1aE\xdf\xa3", "matroska"),
)


class SoundRefused(ValueError):
    """A sound file that cannot be used. The message is the end of a sentence about it."""


def warm_up() -> None:
    """Import what reads sound files, as far as it is installed, so that no child has to."""
    for package in (_SNDFILE, "av"):
        with contextlib.suppress(ImportError, OSError):
            __import__(package)


def decoded(data: bytes, rate: int, most_seconds: float) -> Samples:
    """The sound's samples at `rate`, all channels mixed to one. Raises SoundRefused."""
    if not data:
        raise SoundRefused("is empty: send the bytes of a sound file")
    container = _container_of(data)
    if container is None:
        raise SoundRefused(f"is no sound file that can be read here: send {FORMATS}")
    pieces = _by_sndfile(data, rate, most_seconds) if container == _SNDFILE else _by_ffmpeg(data, container, rate)
    samples: Samples = _guarded(lambda: _joined(pieces, rate, most_seconds))
    if not len(samples):
        raise SoundRefused("has no sound in it: send a longer one")
    if not np.isfinite(samples).all():
        raise SoundRefused("has samples that are not finite numbers: send it in another format")
    return samples


def _container_of(data: bytes) -> str | None:
    for place, magic, name in _CONTAINERS:
        if data[place : place + len(magic)] == magic:
            return name
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:
        # Frames of MPEG; those of layer 0 are AAC's.
        return "aac" if not data[1] & 0x06 else _SNDFILE
    return None


def _joined(pieces: Iterator[Samples], rate: int, most_seconds: float) -> Samples:
    """Join pieces of one channel at `rate`. Raises SoundRefused once they are too long."""
    found: list[Samples] = []
    count = 0
    for piece in pieces:
        found.append(piece)
        count += len(piece)
        if count > most_seconds * rate + 1:
            raise SoundRefused(f"is longer than the {most_seconds:g} s that are possible: send it in parts")
    return np.concatenate(found) if found else np.empty(0, np.float32)


def _by_sndfile(data: bytes, rate: int, most_seconds: float) -> Iterator[Samples]:
    soundfile: Any = _package(_SNDFILE)
    with _guarded(lambda: soundfile.SoundFile(io.BytesIO(data))) as file:
        own = int(file.samplerate)
        if not _LEAST_RATE <= own <= _MOST_RATE:
            raise SoundRefused(f"has {own} samples a second; {_LEAST_RATE} to {_MOST_RATE} are possible: resample it")
        if not 1 <= file.channels <= _MOST_CHANNELS:
            raise SoundRefused(f"has {file.channels} channels; at most {_MOST_CHANNELS} are possible: mix it down")
        mixed = (block.mean(axis=1) for block in _blocks(file))
        yield resampled(_joined(mixed, own, most_seconds), own, rate)


def _blocks(file: Any) -> Iterator[Samples]:
    while len(block := file.read(_PIECE // file.channels, dtype="float32", always_2d=True)):
        yield block


def _by_ffmpeg(data: bytes, container: str, rate: int) -> Iterator[Samples]:
    av: Any = _package("av")
    # No address and no other file is opened, whatever the file names.
    options = {"protocol_whitelist": "none"}
    with av.open(io.BytesIO(data), format=container, container_options=options) as file:
        if not file.streams.audio:
            raise SoundRefused("has no sound in it: send a sound file")
        stream = file.streams.audio[0]
        if stream.codec_context is None:
            raise SoundRefused("has sound in a form that cannot be decoded here: send AAC, Opus or Vorbis")
        stream.thread_type = "NONE"
        stream.codec_context.thread_count = 1
        resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
        for frame in file.decode(stream):
            frame.pts = None  # times that jump would be filled up with silence
            for piece in resampler.resample(frame):
                yield piece.to_ndarray().reshape(-1).astype(np.float32)
        for piece in resampler.resample(None):
            yield piece.to_ndarray().reshape(-1).astype(np.float32)


def _package(name: str) -> Any:
    try:
        return __import__(name)
    except (ImportError, OSError):
        raise SoundRefused(
            f"cannot be read: the package {name} is missing; its operator may install tokenyard[audio]"
        ) from None


def resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    """The samples at another rate, by a windowed sinc that lets pass what both rates can carry."""
    if rate == wanted or not len(samples):
        return samples
    common = math.gcd(rate, wanted)
    up, down = wanted // common, rate // common
    scale = min(1.0, wanted / rate)
    reach = math.ceil(_CROSSINGS / scale)
    count = -(-len(samples) * up // down)
    padded = np.pad(samples, (reach - 1, reach + down))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach)
    out = np.empty(count, np.float32)
    for phase in range(min(up, count)):
        first, rest = divmod(phase * down, up)
        # Distances of the input's samples from this output.
        offsets = np.arange(1 - reach, reach + 1) - rest / up
        inside = np.clip(1 - (offsets / reach) ** 2, 0, None)
        weights = scale * np.sinc(scale * offsets) * np.i0(_BETA * np.sqrt(inside)) / np.i0(_BETA)
        rows = len(range(phase, count, up))
        out[phase::up] = windows[first::down][:rows] @ weights.astype(np.float32)
    return out


def _guarded(read: Callable[[], Any]) -> Any:
    """What `read` returns. Raises SoundRefused for whatever a decoder raises over the bytes of strangers."""
    try:
        return read()
    except (SoundRefused, MemoryError):
        raise
    except Exception as error:
        raise SoundRefused(f"is damaged or cut off ({reason(error)}): send the whole file") from None
