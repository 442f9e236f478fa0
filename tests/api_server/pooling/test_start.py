"""What the files of a late-interaction model say wrongly ends the start of an API process, and not requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from api_server.__main__ import _Model
from shared.endpoints import RunDirectory
from shared.settings import Settings
from tests.api_server.pooling.conftest import checkpoint

BERT = "sentence_bert_config.json"
SENTENCES = "config_sentence_transformers.json"
MASK = "1_Mask/config.json"
PATHS = {"": "x.Transformer", "1_Mask": "x.MultiVectorMask"}


def loaded(tmp_path: Path, name: str, values: dict[str, Any]) -> _Model:
    """A ColBERT with these further values in one of its files, as an API process loads it."""
    path = checkpoint(tmp_path / "colbert", "BertModel")
    (path / "1_Mask").mkdir()
    (path / "modules.json").write_text(json.dumps([{"path": folder, "type": kind} for folder, kind in PATHS.items()]))
    for file, usual in ((BERT, {}), (SENTENCES, {"model_type": "MultiVectorEncoder"}), (MASK, {})):
        (path / file).write_text(json.dumps({**usual, **(values if file == name else {})}))
    return _Model.load(Settings(model=str(path)), RunDirectory(tmp_path))


@pytest.mark.parametrize(
    ("file", "values", "words"),
    [
        (BERT, {"query_length": 0}, "query_length must be a number of tokens of at least 1, got 0"),
        (BERT, {"query_expansion": False}, "query_expansion must be an object with a strategy"),
        (BERT, {"query_expansion": {"strategy": "min", "length": 8, "token": "[no]"}}, "no token '[no]'"),
        (BERT, {"query_expansion": {"strategy": "min", "length": 8, "token": 5}}, "query_expansion must be a text"),
        (MASK, {"skiplist_words": 5}, "skiplist_words must be a list of texts, got 5"),
        (MASK, {"skiplist_tasks": 5}, "skiplist_tasks must be a list of texts, got 5"),
        (SENTENCES, {"prompts": "query"}, "must be an object of texts by name, got 'query'"),
    ],
)
def test_impossible_values_are_refused_by_name(file: str, values: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        loaded(tmp_path, file, values)
    assert words in str(error.value)


@pytest.mark.parametrize("prefix", [" ", "[MASK] ", 5])
def test_any_prefix_of_queries_is_read(prefix: str | int, tmp_path: Path) -> None:
    model = loaded(tmp_path, SENTENCES, {"query_prefix": prefix, "query_length": 8})
    assert model.pooled_model is not None
    assert model.pooled_model.prompt("query", "prompt_name") == str(prefix)
