"""Writes samples as a file of sound, piece by piece: what is written can be sent before the sound is complete.

Wav and raw samples need no library. The others are written by libsndfile (package soundfile), and AAC by ffmpeg
(package av); both are in extras, and an error names the extra. Knows formats; knows neither requests nor models.
"""

from __future__ import annotations

import importlib.util
import io
import struct
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from api_server.errors import ErrorKind, RequestFailed
from api_server.speech.resampling import Resampler

Format = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
FORMATS: tuple[Format, ...] = get_args(Format)

Rate = Literal[8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000]
RATES: tuple[int, ...] = get_args(Rate)
_OPUS_RATES = (8000, 12000, 16000, 24000, 48000)
# Clients of OpenAI's API expect raw samples at this rate.
USUAL_RATE = 24_000

MEDIA_TYPES: dict[Format, str] = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}

# The extra and the package that write a format, where that is no code of this file.
_EXTRAS: dict[Format, tuple[str, str]] = {
    "mp3": ("audio", "soundfile"),
    "opus": ("audio", "soundfile"),
    "flac": ("audio", "soundfile"),
    "aac": ("video", "av"),
}
# libsndfile's names of format and subtype, and options. A reader of a streamed mp3 tells its length by its bytes, which
# takes a constant rate of them.
_LIBSNDFILE: dict[str, dict[str, Any]] = {
    "mp3": {
        "format": "MP3",
        "subtype": "MPEG_LAYER_III",
        "bitrate_mode": "CONSTANT",
        "compression_level": 0.5,
    },
    "opus": {"format": "OGG", "subtype": "OPUS"},
    "flac": {"format": "FLAC", "subtype": "PCM_16"},
}

# Stands in a wav file for a length that is not known yet.
_UNKNOWN = 0xFFFFFFFF


class _Writer(Protocol):
    """Writes samples at the file's rate. `take` returns the bytes since the last call."""

    def write(self, samples: NDArray[np.float32]) -> None: ...

    def end(self) -> None: ...

    def take(self) -> bytes: ...


class Encoder:
    """One file of sound. Its methods take long for long sound: call them in a thread."""

    def __init__(self, kind: Format, source_rate: int, rate: int) -> None:
        """Begin a file. Raises RequestFailed when the library for its format is not installed."""
        check_installed(kind)
        self._resampler = Resampler(source_rate, rate)
        self._writer = _writer(kind, rate)

    def part(self, samples: NDArray[np.float32]) -> bytes:
        """Write samples, and return the bytes that are complete."""
        self._writer.write(self._resampler.push(samples))
        return self._writer.take()

    def rest(self) -> bytes:
        """End the file, and return the last bytes."""
        self._end()
        return self._writer.take()

    def whole(self, samples: NDArray[np.float32]) -> bytes:
        """Return the file of these samples, whose header has its length."""
        self._writer.write(self._resampler.push(samples))
        self._end()
        return self._writer.take()

    def _end(self) -> None:
        self._writer.write(self._resampler.end())
        self._writer.end()


def rate_of(kind: Format, source_rate: int, wanted: int | None) -> int:
    """The rate of a file: the one that is wanted, or the model's own where the format has it. Raises RequestFailed."""
    known = _OPUS_RATES if kind == "opus" else RATES
    if wanted is not None and wanted not in known:
        rates = ", ".join(map(str, known))
        raise RequestFailed(
            ErrorKind.INVALID,
            f"sample_rate must be one of {rates} for response_format {kind}, got {wanted}",
            field="sample_rate",
        )
    if kind == "pcm":
        return wanted or USUAL_RATE
    return wanted or (source_rate if source_rate in known else USUAL_RATE)


def check_installed(kind: Format) -> None:
    """Raises RequestFailed when the library for a format is not installed."""
    extra, package = _EXTRAS.get(kind, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        raise RequestFailed(
            ErrorKind.UNSUPPORTED,
            f"response_format: {kind} needs the package {package} on the server (pip install 'tokenyard[{extra}]'): "
            "ask for wav or pcm",
            field="response_format",
        )


def _writer(kind: Format, rate: int) -> _Writer:
    if kind in ("wav", "pcm"):
        return _Samples(rate if kind == "wav" else None)
    return _Aac(rate) if kind == "aac" else _Libsndfile(kind, rate)


def to_int16(samples: NDArray[np.float32]) -> NDArray[np.int16]:
    """Samples of -1 to 1 as 16-bit integers; what is beyond is cut."""
    whole: NDArray[np.int16] = np.clip(np.rint(samples * 32767.0), -32768, 32767).astype("<i2")
    return whole


class _Samples:
    """Raw samples, 16 bits, behind the header of a wav file if there is a `rate` for it."""

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._data = bytearray()
        self._ended = False

    def write(self, samples: NDArray[np.float32]) -> None:
        self._data += to_int16(samples).tobytes()

    def end(self) -> None:
        self._ended = True

    def take(self) -> bytes:
        header = b"" if self._rate is None else self._header(self._rate)
        self._rate = None
        taken = header + bytes(self._data)
        self._data.clear()
        return taken

    def _header(self, rate: int) -> bytes:
        size = len(self._data) if self._ended else _UNKNOWN
        begin = struct.pack("<4sI4s", b"RIFF", min(size + 36, _UNKNOWN), b"WAVE")
        form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
        return begin + form + struct.pack("<4sI", b"data", size)


class _Sink(io.RawIOBase):
    """A file whose beginning leaves before its end is written. What changes bytes that have left is dropped."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._left = 0
        self._position = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._left + len(self._data)}[whence]
        self._position = begin + offset
        return self._position

    def write(self, data: Any) -> int:
        given = bytes(data)
        at = self._position - self._left
        self._position += len(given)
        if at < 0:
            kept = given[-at:]
            at = 0
        else:
            kept = given
        self._data[at : at + len(kept)] = kept
        return len(given)

    def take(self) -> bytes:
        taken = bytes(self._data)
        self._left += len(taken)
        self._data.clear()
        return taken


class _Libsndfile:
    """A file that libsndfile writes."""

    def __init__(self, kind: str, rate: int) -> None:
        import soundfile

        self._sink = _Sink()
        self._integers = kind == "flac"
        self._file: Any = soundfile.SoundFile(self._sink, "w", samplerate=rate, channels=1, **_LIBSNDFILE[kind])

    def write(self, samples: NDArray[np.float32]) -> None:
        self._file.write(to_int16(samples) if self._integers else np.clip(samples, -1.0, 1.0))

    def end(self) -> None:
        self._file.close()

    def take(self) -> bytes:
        return self._sink.take()


class _Aac:
    """AAC in ADTS frames, which need no header of the file."""

    def __init__(self, rate: int) -> None:
        import av

        self._sink = io.BytesIO()
        self._container: Any = av.open(self._sink, "w", format="adts")
        self._stream: Any = self._container.add_stream("aac", rate=rate, layout="mono")
        self._rate = rate
        self._written = 0

    def write(self, samples: NDArray[np.float32]) -> None:
        import av

        if not len(samples):
            return
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples[None]), format="fltp", layout="mono")
        frame.sample_rate = self._rate
        frame.pts = self._written
        self._written += len(samples)
        self._container.mux(self._stream.encode(frame))

    def end(self) -> None:
        self._container.mux(self._stream.encode(None))
        self._container.close()

    def take(self) -> bytes:
        taken = self._sink.getvalue()
        self._sink.seek(0)
        self._sink.truncate()
        return taken
