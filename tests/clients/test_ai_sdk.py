"""Vercel's `ai` SDK with its three providers, in one node process: each check of ai_sdk.mjs is a test here."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.clients.node import FOLDER, why_not
from tests.system.server import Server

pytestmark = pytest.mark.skipif(why_not("ai") != "", reason=why_not("ai"))

PROVIDERS = ["compatible", "chat", "responses", "anthropic"]
CHECKS = ["text", "stream", "object", "streamed object", "output", "tool loop", "streamed tool loop", "named tool"]
REASONING = ["compatible reasoning", "responses reasoning", "anthropic reasoning"]


@pytest.fixture(scope="module")
def errors(server: Server) -> dict[str, str | None]:
    command = ["node", str(FOLDER / "ai_sdk.mjs"), server.url, "tokenyard-demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    return {line["check"]: line["error"] for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("check", [*(f"{p} {c}" for p in PROVIDERS for c in CHECKS), *REASONING])
def test_a_check(errors: dict[str, str | None], check: str) -> None:
    assert errors[check] is None, errors[check]


def test_no_check_is_left_out(errors: dict[str, str | None]) -> None:
    assert len(errors) == len(PROVIDERS) * len(CHECKS) + len(REASONING)
