"""The requests of the pages about other servers' dialects, as they stand there, against the server of `make run`."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from tests.docs.pages import ROOT
from tests.system.server import Server

PAGES = ("from_vllm.md", "from_sglang.md", "from_tgi.md", "from_llamacpp.md", "ollama.md", "kserve.md")
_SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)
REQUESTS = [
    (page, command)
    for page in PAGES
    for block in _SHELL.findall((ROOT / "docs" / page).read_text())
    for command in re.split(r"^(?=curl )", block, flags=re.MULTILINE)
    if command
]


def test_each_page_has_a_request() -> None:
    assert {page for page, _ in REQUESTS} == set(PAGES)


@pytest.mark.parametrize(("page", "command"), REQUESTS, ids=lambda text: re.findall(r"8000(/\S+)|$", text)[0] or text)
def test_a_request_works_as_pasted(embedded: Server, page: str, command: str) -> None:
    pasted = command.replace("http://127.0.0.1:8000", embedded.url).replace("curl ", "curl --silent --fail-with-body ")
    done = subprocess.run(["bash", "-c", pasted], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines() if line]
    assert answers
    if page == "from_llamacpp.md":
        assert json.loads(answers[0]["choices"][0]["message"]["content"])["colour"] in ("red", "green")
