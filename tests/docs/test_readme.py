"""A newcomer's first minutes: the server that `make run` starts, and every request of the README as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.server import Server

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"```sh\n(curl .*?)```", README, re.DOTALL)


def test_there_are_six_requests() -> None:
    assert len(COMMANDS) == 6


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: re.findall(r"8000(\S+)", command)[0])
def test_a_request_of_the_readme_works_as_pasted(embedded: Server, command: str) -> None:
    pasted = command.replace("http://127.0.0.1:8000", embedded.url).replace("curl ", "curl --silent --fail-with-body ")
    done = subprocess.run(["bash", "-c", pasted], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if '"stream": true' in command:
        frames = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
        assert frames[-1] == "[DONE]"
        assert all(json.loads(frame)["object"] == "chat.completion.chunk" for frame in frames[:-1])
    else:
        assert json.loads(done.stdout)
    if "image_url" in command:
        answer = json.loads(done.stdout)["choices"][0]["message"]["content"]
        assert f'the answer is "{answer}"' in README


def test_the_terminal_chat_answers(embedded: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "chat", "--url", embedded.url],
        input="Hello!\n/exit\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 3
