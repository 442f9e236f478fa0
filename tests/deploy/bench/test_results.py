"""The figures of a result file, against time lines that are known to the millisecond."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.bench.page import ResultError, page, read_results
from deploy.bench.results import Level, Measured, most_at_once, result, time_line
from deploy.bench.timeline import COMPLETED, Timeline

# The keys that scripts which read vLLM's result files ask for.
VLLM = {
    *("date", "backend", "label", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency"),
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
    "max_concurrent_requests",
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
}
ABOUT = {"backend": "openai", "label": None, "model_id": "m", "burstiness": 1.0}


def timeline(sent: float, chunks: list[float], ended: float, tokens: int = 0) -> Timeline:
    return Timeline(sent, [sent + at for at in chunks], sent + ended, 10, tokens or len(chunks), COMPLETED)


# One that answers fast and one that is slow; and one that failed.
TIMELINES = [
    timeline(100.0, [0.1, 0.2, 0.3], 0.3),
    timeline(101.0, [1.0, 1.5, 3.0], 3.0),
    Timeline(101.0, [], 101.5, outcome="HTTP 429"),
]


def made(**goodput: float) -> dict[str, object]:
    return result(Measured(Level(2.0, None), TIMELINES, 4, 12.5), ABOUT, goodput)


def test_the_figures() -> None:
    found = made()
    assert found.keys() >= VLLM
    expected = {
        "completed": 2,
        "failed": 2,
        "duration": 4.0,
        "request_throughput": 0.5,
        "output_throughput": 1.5,
        "total_token_throughput": 6.5,
        "mean_ttft_ms": 550.0,
        "median_tpot_ms": 550.0,
        "mean_itl_ms": 550.0,
        "median_itl_ms": 300.0,
        "mean_e2el_ms": 1650.0,
        "std_e2el_ms": 1350.0,
        "max_concurrent_requests": 2,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["failures"] == {"HTTP 429": 1, "not sent in time": 1}
    assert found["credible"] is False
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("limits", "good"),
    [({"ttft": 500.0}, 1), ({"ttft": 1000.0}, 2), ({"ttft": 1000.0, "itl": 500.0}, 1), ({"e2el": 200.0}, 0)],
)
def test_goodput_counts_those_within_all_limits(limits: dict[str, float], good: int) -> None:
    found = made(**limits)
    assert found["request_goodput"] == pytest.approx(good / 4)
    assert found["goodput_share"] == good / 4


def test_a_load_generator_without_a_core_left_is_not_believed() -> None:
    busy = Measured(Level(None, 4), TIMELINES[:2], 2, 90.0)
    assert result(busy, ABOUT, {})["credible"] is False
    assert result(Measured(Level(None, 4), TIMELINES[:2], 2, 50.0), ABOUT, {})["credible"] is True


def test_requests_in_flight_over_time() -> None:
    seconds, running, tokens = time_line(TIMELINES)
    assert seconds == [0.0, 1.0, 2.0, 3.0]
    assert running == [1, 2, 1, 1]
    assert tokens == [3.0, 0.0, 2.0, 1.0]
    assert most_at_once([timeline(0, [1], 1), timeline(1, [1], 1)]) == 1


def test_a_page_needs_nothing_else(tmp_path: Path) -> None:
    ours = tmp_path / "ours.json"
    ours.write_text(json.dumps([made(ttft=500.0), made(ttft=500.0)]))
    lines = tmp_path / "<theirs>.json"
    theirs = {"request_throughput": 1.0, "median_e2el_ms": 5.0, "output_throughput": 9.0, "request_rate": "inf"}
    lines.write_text("\n".join(json.dumps(theirs | {"label": "<script>"}) for _ in range(3)))
    files = [(file.stem, read_results(file)) for file in (ours, lines)]
    assert [len(results) for _, results in files] == [2, 3]
    html = page(files)
    assert html.count("<svg") >= 6
    for forbidden in ("http://", "https://", "//", "<script", "@import", "url(", " src=", " href="):
        assert forbidden not in html
    assert "&lt;theirs&gt;" in html


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"runs": []}', "[1]", '{"a": 1}\n{"a": 2}'])
def test_a_file_without_results_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ResultError, match=r"bad\.json"):
        read_results(file)
