"""A request that only the worker can refuse fails alone, however many steps its prompt takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from interfaces import Finish, SamplingParams
from tests.model_worker.tiny_models import VOCAB, tiny_model
from tests.system.in_process import InProcessServer, Shape, load


@pytest.mark.parametrize("overlap", [True, False])
def test_a_long_prompt_with_a_bias_outside_the_vocabulary(tmp_path: Path, overlap: bool) -> None:
    loaded = load(tiny_model("llama", tmp_path))
    server = InProcessServer(loaded, Shape(max_batch_tokens=8, overlap=overlap))
    prompt = list(range(3, 43))
    good = SamplingParams(temperature=0, max_new_tokens=6)
    server.submit(prompt, good)
    server.submit(prompt[::-1], SamplingParams(temperature=0, max_new_tokens=6, logit_bias={VOCAB + 7: 1.0}))
    first, bad = server.run()
    assert len(first.tokens) == 6
    assert (bad.finished, bad.tokens) == (Finish.FAILED, [])
    assert str(VOCAB + 7) in bad.error
    server.submit(prompt[::-1], good)
    assert len(server.run()[2].tokens) == 6, "the row is usable again"
