"""Segments as captions: SubRip (srt) and WebVTT."""

from __future__ import annotations

from collections.abc import Iterable

from api_server.transcription.transcriber import Segment


def srt(segments: Iterable[Segment]) -> str:
    """SubRip captions, numbered from 1."""
    return "".join(
        f"{number}\n{_times(segment, ',')}\n{_line(segment)}\n\n" for number, segment in enumerate(segments, 1)
    )


def vtt(segments: Iterable[Segment]) -> str:
    """WebVTT captions."""
    return "WEBVTT\n\n" + "".join(f"{_times(segment, '.')}\n{_line(segment)}\n\n" for segment in segments)


def _times(segment: Segment, point: str) -> str:
    return f"{_time(segment.start, point)} --> {_time(segment.end, point)}"


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"


def _line(segment: Segment) -> str:
    """The text in one line, which an arrow would end as it begins the next caption."""
    return " ".join(segment.text.split()).replace("-->", "->")
