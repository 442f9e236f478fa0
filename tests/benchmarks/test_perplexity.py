"""The perplexity that is reported is the one that transformers' own forward pass gives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.perplexity import documents, main, score
from demo_model.decoder import text_model
from deploy.embedded_model import EMBEDDED_MODEL_PATH
from model_worker.loading.load import load_model
from model_worker.runner import ModelRunner

pytestmark = pytest.mark.slow


def test_score_is_the_mean_loss_of_the_answers() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(EMBEDDED_MODEL_PATH)
    texts = list(documents(tokenizer, 1))
    model: Any = text_model(EMBEDDED_MODEL_PATH)
    losses: list[float] = []
    for text in texts:
        said = tokenizer.decode(text.ids)
        assert tokenizer.decode(text.ids[text.answered]) == said.rpartition("<|im_start|>assistant\n")[2]
        labels = torch.full((1, len(text.ids)), -100)
        labels[0, text.answered] = torch.from_numpy(text.ids[text.answered])
        with torch.no_grad():
            loss = model(input_ids=torch.from_numpy(text.ids)[None], labels=labels).loss
        losses += [float(loss)] * len(text.answered)
    loaded = load_model(EMBEDDED_MODEL_PATH, "float32", "cpu", lambda *_: None)
    result = score(ModelRunner(loaded, 200, 16), texts)
    assert result.tokens == len(losses)
    assert result.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-3)


def test_the_table_has_all_kinds_of_weights_and_caches(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--prompts", "1", "--exact"])
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines() if "MB" in line]
    assert [row[0] for row in rows] == ["exact", "bfloat16", "int8", "kv", "kv"]
    stored, *fewer_bits = (float(row[-6]) for row in rows[1:])
    # In bfloat16 only activations are rounded, which may be too little for five digits.
    assert 0 <= stored < 0.1
    assert all(0 < divergence < 0.1 for divergence in fewer_bits)
    bytes_of_token = [int(row[-3]) for row in rows]
    assert bytes_of_token[3] == bytes_of_token[4] < 0.6 * bytes_of_token[1]


def test_rows_that_do_not_exist_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "int8,kv int4"])
    assert "--only has kv int4; rows are stored, int8, kv int8, kv fp8" in capsys.readouterr().err
