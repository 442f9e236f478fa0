"""A setting names drafters; of models there may be one, whose tokens are those of the model that is served."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from deploy import embedded_model
from model_worker.drafters.chosen import model_named, without_models
from model_worker.loading.draft import DraftModelGuesser, load_guesser, share_of
from model_worker.loading.load import load_model
from tests.model_worker.tiny_models import own_tiny_model

WEIGHTS = Path(embedded_model.__file__).parent / "weights"


def test_names_are_drafters_and_one_model() -> None:
    assert [drafter.name for drafter in without_models("text, suffix")] == ["text", "suffix"]
    assert [drafter.name for drafter in without_models("./small,suffix")] == ["suffix"]
    assert model_named("text,./small") == "./small"
    assert model_named("text,suffix") is None
    with pytest.raises(ValueError, match=r"draft names the models \./a, \./b, and one can guess"):
        model_named("./a,text,./b")


def test_a_model_with_other_tokens_or_fewer_positions_is_refused(tmp_path: Path) -> None:
    path = own_tiny_model("llama", tmp_path / "model", vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(WEIGHTS / name, path / name)
    other = shutil.copytree(path, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 4095, "content": "<|other|>"})
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    loaded = load_model(path, "float32", "cpu", lambda *_: None)
    draft = load_guesser(str(path), str(path), loaded, lambda *_: None)
    assert draft.layout == loaded.attention.layout
    assert share_of(1000, loaded, draft, rows=4) == 500
    with pytest.raises(ValueError, match=r"draft: the model .* has other tokens than"):
        load_guesser(str(other), str(path), loaded, lambda *_: None)
    DraftModelGuesser(replace(loaded, max_position=None)).check_length(1 << 20)
    with pytest.raises(ValueError, match="max_model_len to 100"):
        DraftModelGuesser(replace(loaded, max_position=100)).check_length(101)
