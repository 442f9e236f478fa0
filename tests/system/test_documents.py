"""Documents through a whole server: their text reaches the model, and a URL's secret reaches no log."""

from __future__ import annotations

import base64
import random
import secrets
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.api_server.served_app import Web, answer, running
from tests.system.server import Server


@pytest.fixture
def web() -> Iterator[Web]:
    with running(Web()) as served:
        yield served


def words() -> str:
    return " ".join(random.choice(("fox", "dog", "Größe", "日本", "12")) for _ in range(30))


def test_real_clients_send_documents_in_each_dialect(server: Server, web: Web) -> None:
    """The answer is the one to the same text as it is documented."""
    text, secret = words(), secrets.token_hex()
    web.pages = {"/a/notes.txt": answer(text.encode(), "Content-Type: text/plain")}
    url = web.url(f"/a/notes.txt?key={secret}")
    data = f"data:text/plain;base64,{base64.b64encode(text.encode()).decode()}"
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def chat(content: Any) -> tuple[str | None, int]:
        made = client.chat.completions.create(
            model="", messages=[{"role": "user", "content": content}], max_tokens=8, temperature=0
        )
        assert made.usage is not None
        return made.choices[0].message.content, made.usage.prompt_tokens

    def respond(content: Any) -> tuple[str, int]:
        made = client.responses.create(
            model="", input=[{"role": "user", "content": content}], max_output_tokens=8, temperature=0
        )
        assert made.usage is not None
        return made.output_text, made.usage.input_tokens

    plain = chat(f"Document: notes.txt\n\n{text}")
    assert plain[1] > 30
    assert chat([{"type": "file", "file": {"filename": "notes.txt", "file_data": data}}]) == plain
    assert respond([{"type": "input_file", "filename": "notes.txt", "file_data": data}]) == plain
    assert respond([{"type": "input_file", "file_url": url}]) == plain

    messages = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0).messages
    for source in ({"type": "url", "url": url}, {"type": "text", "media_type": "text/plain", "data": text}):
        block: Any = {"type": "document", "title": "notes.txt", "source": source}
        made = messages.create(
            model="", messages=[{"role": "user", "content": [block]}], max_tokens=8, extra_body={"temperature": 0}
        )
        assert [part.text for part in made.content if part.type == "text"] == [plain[0]]
        assert made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0) == plain[1]
    assert len(web.heads) == 2
    assert secret in web.heads[0]
    assert secret not in server.log.read_text()


def test_refusals_reach_the_clients_in_their_form(server: Server, web: Web) -> None:
    web.pages = {"/": answer(b"", status="503 Busy")}
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    part: Any = {"type": "input_file", "file_url": web.url()}
    with pytest.raises(openai.BadRequestError, match=r"'127\.0\.0\.1' answers with status 503") as caught:
        client.responses.create(model="", input=[{"role": "user", "content": [part]}])
    assert caught.value.param == "input[0].content[0].file_url"
    block: Any = {"type": "document", "source": {"type": "url", "url": web.url(host="localhost")}}
    with pytest.raises(anthropic.BadRequestError, match="'localhost' is not among the hosts"):
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0).messages.create(
            model="", messages=[{"role": "user", "content": [block]}], max_tokens=8
        )
