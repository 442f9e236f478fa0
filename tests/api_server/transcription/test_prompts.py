"""The tokens before a transcript are those of transformers, for models of many languages and of English alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from api_server.transcription.prompts import prompt_of
from shared.recogniser_files import RecogniserFiles
from tests.model_worker.hearing.tiny_whisper import features, load, speech, tiny_whisper


@pytest.mark.parametrize("multilingual", [True, False])
@pytest.mark.parametrize("timestamps", [True, False])
def test_prompts_are_those_of_transformers(multilingual: bool, timestamps: bool, tmp_path: Path) -> None:
    folder = tiny_whisper(tmp_path, multilingual)
    files = RecogniserFiles.read(str(folder), lambda _: None)
    assert files is not None
    named = {"language": "de", "task": "transcribe"} if multilingual else {}
    model: Any = load(folder)
    found = model.generate(
        torch.from_numpy(features(speech(1, 0.5)))[None],
        return_timestamps=timestamps,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        force_unique_generate_call=True,
        **named,
    )
    want = found.sequences[0, : -len(found.scores)].tolist()
    # A model of English alone has no tokens for a language and a task.
    assert prompt_of(files, "de" if multilingual else "en", "transcribe", [], timestamps) == want
    assert len(want) == 1 + 2 * multilingual + (not timestamps)
