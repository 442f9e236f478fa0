"""Ollama's npm package, in one node process: each check of ollama_client.mjs is a test here."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.clients.node import FOLDER, why_not
from tests.system.server import Server

pytestmark = pytest.mark.skipif(why_not("ollama") != "", reason=why_not("ollama"))

CHECKS = ["list", "show", "chat", "streamed chat", "an ended stream", "generate", "a schema", "a tool loop", "thinking"]
CHECKS += ["a picture", "what is managed elsewhere", "wrong names"]
PICTURE = FOLDER.parents[1] / "docs" / "pictures" / "bars.png"


@pytest.fixture(scope="module")
def errors(server: Server) -> dict[str, str | None]:
    command = ["node", str(FOLDER / "ollama_client.mjs"), server.url, "tokenyard-demo", str(PICTURE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return {line["check"]: line["error"] for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("check", CHECKS)
def test_a_check(errors: dict[str, str | None], check: str) -> None:
    assert errors[check] is None, errors[check]


def test_no_check_is_left_out(errors: dict[str, str | None]) -> None:
    assert sorted(errors) == sorted(CHECKS)
