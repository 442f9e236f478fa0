"""lm-eval itself asks for log-likelihoods, if it is here: TOKENYARD_TEST_LM_EVAL is the path of its `lm_eval` command.

It has a hundred dependencies of its own, so our environment does not have it. What it sends is tested without it in
`test_dialects.py`.
"""

from __future__ import annotations

import json
import os
import random
import string
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.system.server import Server

COMMAND = os.environ.get("TOKENYARD_TEST_LM_EVAL", "")
TASK = """
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


@pytest.mark.skipif(not COMMAND, reason="TOKENYARD_TEST_LM_EVAL names no lm_eval command")
def test_loglikelihoods_are_the_models(server: Server, model: Path, tmp_path: Path) -> None:
    def words(most: int) -> str:
        made = ("".join(random.choices(string.ascii_lowercase, k=random.randint(1, 6))) for _ in range(most))
        return " ".join(made)

    docs = [{"question": words(9), "choices": [words(2), words(3)], "answer": 0} for _ in range(12)]
    data = tmp_path / "docs.json"
    data.write_text("\n".join(map(json.dumps, docs)))
    (tmp_path / "words.yaml").write_text(TASK.format(data=data))
    arguments = {
        "base_url": f"{server.url}/v1/completions",
        "model": model.name,
        "tokenizer": str(model),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
    }
    options = ["--model", "local-completions", "--tasks", "words", "--include_path", str(tmp_path), "--log_samples"]
    options += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        [COMMAND, *options, "--output_path", str(tmp_path / "out")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (tmp_path / "out").rglob("samples_words_*.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    told = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(told) == len(docs)
    for sample in told:
        for asked, ((likelihood, _),) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            context = tokenizer(asked["arg_0"])["input_ids"]
            whole = torch.tensor([tokenizer(asked["arg_0"] + asked["arg_1"])["input_ids"]])
            with torch.inference_mode():
                scores = reference(whole).logits[0].log_softmax(-1)
            expected = sum(float(scores[i - 1, whole[0, i]]) for i in range(len(context), whole.shape[1]))
            assert float(likelihood) == pytest.approx(expected, abs=1e-3)
