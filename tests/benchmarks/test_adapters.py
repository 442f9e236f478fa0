"""The measurement of adapters ends in time with what it has, and says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from benchmarks.standard_model import LARGER, standard_model

COMMAND = [sys.executable, "-m", "benchmarks.adapters", "--size", "tiny", "--rank", "2", "--context", "16"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "status", "word"),
    [
        (["--rounds", "1", "--seconds", "0.01"], 0, "round 1 of 1: the base alone, once more"),
        (["--rounds", "2", "--limit", "1e-9"], 1, "only 0 of 2 rounds"),
        (["--rounds", "1000000", "--seconds", "0.01", "--limit", "3"], 1, " rounds ended within 3 s: raise --limit"),
    ],
)
def test_it_ends_with_a_reason(options: list[str], status: int, word: str) -> None:
    threads = str(torch.get_num_threads())
    done = subprocess.run([*COMMAND, "--threads", threads, *options], capture_output=True, text=True, check=False)
    assert (done.returncode, word in done.stderr) == (status, True), done.stderr
    assert ("sixteen of four" in done.stdout) == ("only 0" not in word)


def test_the_shape_of_half_a_billion_parameters_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {**LARGER["0.5b"], "num_hidden_layers": 1, "vocab_size": 49152, "intermediate_size": 64}
    monkeypatch.setitem(LARGER, "0.5b", shape)
    config = AutoConfig.from_pretrained(standard_model(tmp_path / "model", "0.5b"))
    assert (config.model_type, config.hidden_size, config.num_key_value_heads) == ("qwen2", 896, 2)
