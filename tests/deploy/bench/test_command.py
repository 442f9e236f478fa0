"""`tokenyard bench` and `tokenyard top` against the real routes, with the scheduler double behind them."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api_server.text.tokenizer import Tokenizer
from deploy import cli
from deploy.bench import levels
from deploy.bench.client import Client, Finished
from deploy.bench.levels import Plan
from deploy.bench.results import Level, Measured
from interfaces.messages import Submit
from shared.endpoints import RunDirectory
from shared.settings import Settings
from tests.api_server.conftest import (  # noqa: F401 (fixtures)
    LiveServer,
    double,
    model_directory,
    run_directory,
    serving,
    tokenizer,
)
from tests.api_server.scheduler_double import SchedulerDouble
from tests.system.server import free_port

SMALL = ["--requests", "6", "--warmup", "1", "--prompt-tokens", "8", "--output-tokens", "3", "--token-ids", "10-200"]


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENYARD_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    # The server is in this process, too, and so is what it takes.
    for module in ("command", "results"):
        monkeypatch.setattr(f"deploy.bench.{module}.MOST_CLIENT_CPU_PERCENT", 1e9)


@pytest.fixture
def live(
    double: SchedulerDouble,  # noqa: F811
    run_directory: RunDirectory,  # noqa: F811
    tokenizer: Tokenizer,  # noqa: F811
    model_directory: Path,  # noqa: F811
) -> Iterator[LiveServer]:
    with serving(double, run_directory, tokenizer, Settings(model=str(model_directory))) as server:
        yield server


def results_of(file: Path) -> Any:
    return json.loads(file.read_text())


def test_one_load_is_one_object_and_a_list_of_loads_is_a_list(live: LiveServer, tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    assert cli.main(["bench", live.url, *SMALL, "--concurrency", "2", "--ignore-eos", "--save", str(file)]) == 0
    one = results_of(file)
    assert (one["completed"], one["failed"], one["max_concurrency"], one["request_rate"]) == (6, 0, 2, "inf")
    assert (one["total_input_tokens"], one["model_id"]) == (48, live.state.model_name)
    assert one["max_concurrent_requests"] <= 2
    bodies = [submit.text for submit in live.double.submits]
    assert len(bodies) == 7
    assert len({tuple(text.tokens.prompt.tolist()) for text in bodies}) == 7
    several = tmp_path / "several.json"
    assert cli.main(["bench", live.url + "/v1/", *SMALL, "--concurrency", "1,2", "--save", str(several)]) == 0
    assert [level["max_concurrency"] for level in results_of(several)] == [1, 2]
    html = tmp_path / "page.html"
    assert cli.main(["bench", "plot", str(file), str(several), "-o", str(html)]) == 0
    assert "<svg" in html.read_text()


def test_an_interrupt_keeps_the_loads_that_have_ended(
    live: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer_of = live.double.answer

    def interrupting(submit: Submit) -> list[int]:
        # One request of the warm-up, six of the first load.
        if len(live.double.submits) == 9:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return answer_of(submit)

    live.double.answer = interrupting
    file = tmp_path / "first.json"
    assert cli.main(["bench", live.url, *SMALL, "--concurrency", "1,2", "--ignore-eos", "--save", str(file)]) == 1
    assert (results_of(file)["completed"], results_of(file)["max_concurrency"]) == (6, 1)
    assert "tokenyard: interrupted; the loads before it are complete" in capsys.readouterr().err


def test_a_late_error_keeps_the_loads_that_have_ended(
    live: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = levels.run

    async def failing(client: Client, plan: Plan, level: Level, number: int, finished: Finished) -> Measured:
        if number == 1:
            raise OSError("no more sockets")
        return await run(client, plan, level, number, finished)

    monkeypatch.setattr(levels, "run", failing)
    file = tmp_path / "first.json"
    assert cli.main(["bench", live.url, *SMALL, "--concurrency", "1,2", "--ignore-eos", "--save", str(file)]) == 1
    assert results_of(file)["completed"] == 6
    assert "tokenyard: no more sockets; the loads before it are complete" in capsys.readouterr().err


def test_chat_at_a_rate_with_goodput(live: LiveServer, tmp_path: Path) -> None:
    dataset = tmp_path / "lines.jsonl"
    dataset.write_text('{"prompt": "Hello"}\n{"prompt": "How are you?"}\n')
    file = tmp_path / "chat.json"
    flags = ["--chat", "--dataset", str(dataset), "--output-tokens", "3", "--requests", "6", "--rate", "200"]
    more = ["--goodput", "e2el:60000", "--body", '{"top_p": 0.5}', "--save", str(file)]
    assert cli.main(["bench", live.url, *flags, *more]) == 0
    found = results_of(file)
    assert (found["completed"], found["backend"], found["request_rate"]) == (6, "openai-chat", 200.0)
    assert found["goodput_share"] == 1.0
    assert found["mean_ttft_ms"] > 0
    assert {submit.text.sampling_params.top_p for submit in live.double.submits} == {0.5}


def test_failures_and_servers_that_are_not_there(
    live: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", live.url, *SMALL, "--body", '{"temperature": -1}']) == 1
    said = capsys.readouterr().err
    assert "HTTP 400" in said
    assert "temperature" in said
    assert cli.main(["bench", f"http://127.0.0.1:{free_port()}", *SMALL]) == 1
    assert "no server answers" in capsys.readouterr().err
    assert cli.main(["bench", live.url, "--concurrency", "1,2", "--sweep"]) == 2
    assert "--sweep" in capsys.readouterr().err
    assert cli.main(["bench", "plot", str(tmp_path / "missing.json")]) == 2
    assert "missing.json" in capsys.readouterr().err


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["bench", f"http://127.0.0.1:{free_port()}"]) == 2
    assert "tokenyard[bench]" in capsys.readouterr().err


def test_top_shows_what_the_server_does(live: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["bench", live.url, *SMALL])
    capsys.readouterr()
    assert cli.main(["top", "--url", live.url, "--once"]) == 0
    shown = capsys.readouterr().out
    assert live.state.model_name in shown
    for word in ("ready", "output tok/s", "running", "waiting", "first token", "KV used", "cpu"):
        assert word in shown


def test_top_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--url", f"http://127.0.0.1:{free_port()}", "--once"]) == 1
    assert "no server answers" in capsys.readouterr().err
