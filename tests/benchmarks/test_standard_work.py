"""The standard work is what its definition says, and servers are started for all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from benchmarks.encoder_words import words
from benchmarks.places import standard_model_in
from benchmarks.standard_work import STANDARD_WORK, Needs, chosen_work
from deploy.bench.workload import plan


@pytest.mark.parametrize(
    ("name", "concurrency", "prompt", "output"),
    [("W1", 1, 128, 128), ("W2", 16, 128, 128), ("W3", 32, 512, 64), ("W4", 8, 1056, 32), ("W5", 64, 32, 64)],
)
def test_shapes(name: str, concurrency: int, prompt: int, output: int) -> None:
    work = STANDARD_WORK[name]
    requests = plan(work.workload(7, prefix_seed=7))
    assert {(len(request.prompt), request.output_tokens) for request in requests} == {(prompt, output)}
    assert (work.load(5.0).concurrency, work.load(5.0).time_limit) == (concurrency, 5.0)
    assert len(requests) >= concurrency


def test_the_intruder_fits_beside_the_streams() -> None:
    work = STANDARD_WORK["W6"]
    needs = Needs.of([work, STANDARD_WORK["W1"]], threads=2)
    assert work.intruder is not None
    assert (work.concurrency, work.intruder.prompt_tokens, work.intruder.every_s) == (8, 4096, 3.0)
    assert needs.sequences == 9
    assert needs.context > 4096 + 1
    assert needs.context > work.prompt_tokens + work.output_tokens


@pytest.mark.parametrize(("name", "in_flight", "tokens"), [("E1/1", 1, 16), ("E2/32", 32, 128), ("E3/256", 256, 512)])
def test_work_on_an_encoder_is_texts_of_so_many_tokens(name: str, in_flight: int, tokens: int, tmp_path: Path) -> None:
    work = STANDARD_WORK[name]
    assert (work.embeds, work.concurrency, work.longest) == (True, in_flight, tokens)
    encoder = standard_model_in(tmp_path, "encoder-tiny")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(encoder)
    for request in plan(work.shortened().workload(3)):
        encoded = tokenizer(words(request.prompt))["input_ids"]
        assert encoded[1:-1] == request.prompt
        assert len(encoded) == work.shortened().longest


def test_work_on_a_gguf_file_wants_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENYARD_BENCH_GGUF", raising=False)
    with pytest.raises(ValueError, match="TOKENYARD_BENCH_GGUF must name the GGUF file that is served, and is ''"):
        standard_model_in(tmp_path, STANDARD_WORK["Q1"].model)
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setenv("TOKENYARD_BENCH_GGUF", str(file))
    assert standard_model_in(tmp_path, STANDARD_WORK["Q16"].model) == file


def test_a_choice_keeps_the_order_and_names_what_it_does_not_know() -> None:
    assert [work.name for work in chosen_work("w3, W1")] == ["W1", "W3"]
    assert [work.name for work in chosen_work("")] == [name for name in STANDARD_WORK if not name.startswith("Q")]
    assert [work.name for work in chosen_work("q16,Q1")] == ["Q1", "Q16"]
    assert [work.name for work in chosen_work("e3/32,E1")] == ["E1/1", "E1/32", "E1/256", "E3/32"]
    assert {work.model for work in chosen_work("", short=True)} == {"tiny", "encoder-tiny"}
    with pytest.raises(ValueError, match="got W9"):
        chosen_work("W1,W9")
