"""Words and their times are those of transformers for Whisper."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.whisper import generation_whisper
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from api_server.transcription.alignment import median_filtered, path_of, token_times
from api_server.transcription.words import words_of
from tests.api_server.conftest import byte_level_backend

TEXTS = [
    ' The quick brown fox, said he, jumps "over" the lazy dog.',
    "no space at first (but later) - and: so on!",
    " déjà vu, 你好。 naïve ¿qué?",
    " 你好，世界！今天天气好。",
    " a  b .",
    " ",
]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_words_are_those_of_transformers(language: str) -> None:
    backend = byte_level_backend()
    judge: Any = SimpleNamespace(
        decode=lambda tokens, decode_with_timestamps: backend.decode(tokens, skip_special_tokens=False),
        eos_token_id=backend.get_vocab_size(),
        language=None,
    )
    names = {"en": "english", "zh": "chinese"}
    for text in TEXTS:
        tokens = backend.encode(text, add_special_tokens=False).ids
        times = [(float(i), i + 0.5) for i in range(len(tokens))]
        words, _, indices = _combine_tokens_into_words(judge, tokens, names[language])
        want = [
            (word.strip(), times[places[0]][0], times[places[-1]][1])
            for word, places in zip(words, indices, strict=True)
            if word.strip()
        ]
        found = words_of(tokens, times, language, lambda ids: backend.decode(list(ids), skip_special_tokens=False))
        assert [(word.text, word.start, word.end) for word in found] == want


@pytest.mark.parametrize(("tokens", "positions"), [(1, 9), (2, 3), (7, 40), (24, 50), (30, 11)])
def test_times_of_tokens_are_those_of_transformers(tokens: int, positions: int) -> None:
    generator = np.random.default_rng(tokens)
    weights = generator.random((tokens, 3, positions), np.float32)
    smooth = generation_whisper._median_filter(torch.from_numpy(weights.transpose(1, 0, 2))[None], 7)
    np.testing.assert_array_equal(median_filtered(weights.transpose(1, 0, 2), 7), smooth[0].numpy())
    costs = generator.random((tokens, positions))
    text, time = generation_whisper._dynamic_time_warping(costs)
    first = np.pad(np.diff(text), (1, 0), constant_values=1).astype(bool)
    np.testing.assert_array_equal(path_of(costs), time[first])
    config = SimpleNamespace(decoder_layers=1, median_filter_width=7)
    # One pass over the two tokens of a prompt, and one for each further token.
    begin = np.zeros((2, 3, positions), np.float32)
    passes = [begin, *(row[None] for row in weights)]
    given = SimpleNamespace(
        cross_attentions=[(torch.from_numpy(each.transpose(1, 0, 2).copy())[None],) for each in passes],
        sequences=torch.zeros(1, tokens + 3),
    )
    own: Any = generation_whisper.WhisperGenerationMixin._extract_token_timestamps
    output: Any = type("Output", (), {"__contains__": lambda self, name: False})()
    output.cross_attentions, output.sequences = given.cross_attentions, given.sequences
    want = own(SimpleNamespace(config=config), output, [(0, head) for head in range(3)], num_input_ids=2)
    np.testing.assert_allclose(token_times(weights, 7), np.maximum(want[0, 2:].numpy(), 0), atol=1e-6)


def test_a_window_without_text_has_one_time() -> None:
    assert token_times(np.empty((0, 2, 9), np.float32), 7) == [0.0]
