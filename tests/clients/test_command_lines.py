"""Claude Code and Codex CLI, as they come, through a whole loop: prompt, tool call, its real result, answer.

They run where nothing but this machine can be reached, so what they do is done with this server alone.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import SERVER_PYTHON
from tests.clients.loopback import is_alone
from tests.clients.node import MODULES, why_not
from tests.system.server import Server

pytestmark = [
    pytest.mark.skipif(not is_alone(), reason="this system lets no process make a network namespace"),
    pytest.mark.timeout(400),  # the model learns for half a minute on two quiet cores
]

ROOT = Path(__file__).parents[2]
PROMPT = "Show me the note."
NOTE = "slow lamp"


@pytest.fixture(scope="module")
def shell_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("shell-model")
    subprocess.run([SERVER_PYTHON, "-m", "tests.clients.shell_model", str(folder)], check=True, cwd=ROOT)
    flags = ["--served-model-name", "tokenyard-demo", "--tool-parser", "hermes", "--reasoning-parser", "think"]
    with Server(folder, flags, tmp_path_factory.mktemp("shell") / "log", python=SERVER_PYTHON) as running:
        yield running


def run(command: list[str], home: Path, **environment: str) -> list[dict[str, Any]]:
    """The JSON lines that it prints, run in a folder with the note, with a home of its own."""
    work = home / "work"
    work.mkdir()
    (work / "note.txt").write_text(f"{NOTE}\n")
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        command,
        cwd=work,
        env={**kept, "HOME": str(home), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(why_not("@anthropic-ai/claude-code") != "", reason=why_not("@anthropic-ai/claude-code"))
def test_claude_code(shell_server: Server, tmp_path: Path) -> None:
    wrapper = MODULES / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"
    flags = ["--print", "--verbose", "--output-format", "stream-json", "--model", "tokenyard-demo"]
    events = run(
        ["node", str(wrapper), *flags, "--allowedTools", "Bash", "--", PROMPT],
        tmp_path,
        ANTHROPIC_BASE_URL=shell_server.url,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_MODEL="tokenyard-demo",
        ANTHROPIC_SMALL_FAST_MODEL="tokenyard-demo",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    blocks = [
        block for event in events if event["type"] in ("assistant", "user") for block in event["message"]["content"]
    ]
    (use,) = (block for block in blocks if block["type"] == "tool_use")
    (result,) = (block for block in blocks if block["type"] == "tool_result")
    assert (use["name"], use["input"]) == ("Bash", {"command": "cat note.txt"})
    assert result["content"] == NOTE
    end = events[-1]
    assert (end["type"], end["is_error"], end["num_turns"]) == ("result", False, 2)
    assert end["result"] == f"The tool says: {NOTE}"


@pytest.mark.skipif(why_not("@openai/codex") != "", reason=why_not("@openai/codex"))
def test_codex(shell_server: Server, tmp_path: Path) -> None:
    home = tmp_path / ".codex"
    home.mkdir()
    (home / "config.toml").write_text(
        f"""
model = "tokenyard-demo"
model_provider = "yard"
model_reasoning_effort = "medium"
[model_providers.yard]
name = "yard"
base_url = "{shell_server.url}/v1"
wire_api = "responses"
"""
    )
    script = MODULES / "@openai" / "codex" / "bin" / "codex.js"
    # Its own sandbox wants rights that a container may not give; what it runs here is `cat`.
    flags = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
    events = run(["node", str(script), *flags, PROMPT], tmp_path, CODEX_HOME=str(home))
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    (command,) = (item for item in items if item["type"] == "command_execution")
    assert (command["exit_code"], command["aggregated_output"].strip()) == (0, NOTE)
    assert "cat note.txt" in command["command"]
    thoughts = [item["text"] for item in items if item["type"] == "reasoning"]
    assert "exec_command" in thoughts[0]
    (answer,) = (item for item in items if item["type"] == "agent_message")
    assert answer["text"] == f"The tool says: {NOTE}"
    assert events[-1]["type"] == "turn.completed"
