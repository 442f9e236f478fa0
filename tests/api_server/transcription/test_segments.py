"""Segments are those that transformers cuts a window's tokens into, and captions have their times."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from api_server.transcription.captions import srt, vtt
from api_server.transcription.segments import cut_at_timestamps
from api_server.transcription.transcriber import Segment
from shared.recogniser_files import MelForm, RecogniserFiles

FILES = RecogniserFiles(
    MelForm(8), 1500, 448, 2000, start=300, end=299, placeholder=299, no_timestamps=310, previous=305
)


def test_segments_are_those_of_transformers() -> None:
    generator = np.random.default_rng()
    cut = WhisperGenerationMixin._retrieve_segment
    for _ in range(300):
        count = int(generator.integers(1, 9))
        times = FILES.first_timestamp + np.sort(generator.integers(0, 1500, count))
        tokens = np.where(generator.random(count) < 0.6, times, generator.integers(0, 299, count)).tolist()
        seek = int(generator.integers(0, 9000))
        frames = int(generator.integers(1, 3001))
        segments, offset = cut(
            seek_sequence=torch.tensor(tokens),
            seek_outputs=[torch.tensor(tokens)],
            time_offset=torch.tensor([seek], dtype=torch.float64) * 0.02 / 2,
            timestamp_begin=FILES.first_timestamp,
            seek_num_frames=torch.tensor([frames]),
            time_precision=0.02,
            time_precision_features=0.01,
            input_stride=2,
            prev_idx=0,
            idx=0,
            return_token_timestamps=False,
            decoder_input_ids=torch.zeros(1, 3, dtype=torch.long),
        )
        found = cut_at_timestamps(tokens, seek, frames, FILES)
        assert found.frames == int(offset)
        assert [span.tokens for span in found.spans] == [segment["tokens"].tolist() for segment in segments]
        for span, segment in zip(found.spans, segments, strict=True):
            # transformers rounds the end of a window without times down, by a product of floats.
            np.testing.assert_allclose(span.start, float(segment["start"]))
            np.testing.assert_allclose(span.end, float(segment["end"]), atol=0.0201)


def segment(start: float, end: float, text: str) -> Segment:
    return Segment(0, start, end, text, [], 0.0, 0.0, 0.0)


def test_captions_have_the_times_of_their_format() -> None:
    segments: list[Any] = [segment(0, 1.5, " Hello\nworld"), segment(3599.999, 7325.25, " a --> b")]
    assert srt(segments) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello world\n\n2\n00:59:59,999 --> 02:02:05,250\na -> b\n\n"
    )
    assert vtt(segments) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello world\n\n00:59:59.999 --> 02:02:05.250\na -> b\n\n"
    )
