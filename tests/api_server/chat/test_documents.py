"""Documents as parts of messages, in every dialect that has messages: what the model reads, and what is refused."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_server.chat.documents import MOST_DOCUMENTS, _check_type, _shown, file_fields
from api_server.chat.documents import Document as DocumentPart
from api_server.chat.url_fetch import MOST_BYTES, UrlFetcher
from api_server.errors import RequestFailed
from api_server.text.tokenizer import Tokenizer
from shared.fetch_hosts import FetchHosts
from tests.api_server.conftest import LiveServer, leave_when
from tests.api_server.dialects.test_anthropic import prompt_of
from tests.api_server.served_app import Web, answer, running

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TEXT = "The Größe of the fox: 日本"


def b64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def file(**fields: Any) -> dict[str, Any]:
    return {"type": "file", "file": fields}


def input_file(**fields: Any) -> dict[str, Any]:
    return {"type": "input_file", **fields}


def document(source: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **fields}


def body(path: str, *parts: Any) -> dict[str, Any]:
    turn = {"role": "user", "content": list(parts)}
    if path == RESPONSES:
        return {"input": [turn]}
    return {"messages": [turn]} | ({"max_tokens": 5} if path == MESSAGES else {})


def by_url(path: str, url: str) -> dict[str, Any]:
    if path == MESSAGES:
        return document({"type": "url", "url": url})
    return file(file_url=url) if path == CHAT else input_file(file_url=url)


def post(live: LiveServer, path: str, *parts: Any, timeout: float = 10, limit: str = "60") -> httpx.Response:
    headers = {"x-request-timeout": limit}
    return httpx.post(live.url + path, json=body(path, *parts), timeout=timeout, headers=headers)


def said(response: httpx.Response, live: LiveServer) -> str:
    """The message of a 400 that reached nobody."""
    assert response.status_code == 400, response.text
    assert not live.double.submits
    message: str = response.json()["error"]["message"]
    return message


@pytest.fixture
def web() -> Iterator[Web]:
    with running(Web()) as served:
        yield served


@pytest.fixture
def fetching(live: LiveServer) -> LiveServer:
    live.state.url_fetcher = UrlFetcher(FetchHosts.parse("127.0.0.1"))
    return live


@pytest.mark.parametrize(
    ("path", "part", "header"),
    [
        (CHAT, file(filename="a.txt", file_data=f"data:text/plain;base64,{b64(TEXT)}"), "Document: a.txt"),
        (CHAT, file(filename="a.json", file_data=f"data:application/json;base64,{b64(TEXT)}"), "Document: a.json"),
        (CHAT, file(file_data=b64(TEXT)), "Document: unnamed"),
        (RESPONSES, input_file(filename="b\nc.md", file_data=b64(TEXT)), "Document: b c.md"),
        (RESPONSES, input_file(file_data=f"data:text/x-c;charset=UTF-8;base64,{b64(TEXT)}"), "Document: unnamed"),
        (RESPONSES, input_file(file_data="data:;base64," + b64("\ufeff" + TEXT)), "Document: unnamed"),
        (MESSAGES, document({"type": "text", "media_type": "text/plain", "data": TEXT}), "Document: unnamed"),
        (MESSAGES, document({"type": "base64", "media_type": "text/csv", "data": b64(TEXT)}, title="d"), "Document: d"),
        (
            MESSAGES,
            document({"type": "text", "media_type": "text/plain", "data": TEXT}, title="d", context=" of \n1999 "),
            "Document: d\nContext: of \n1999",
        ),
    ],
)
def test_the_model_reads_a_document_as_text(
    live: LiveServer, tokenizer: Tokenizer, path: str, part: dict[str, Any], header: str
) -> None:
    text = {"type": "input_text" if path == RESPONSES else "text", "text": "and this?"}
    response = post(live, path, part, text)
    assert response.status_code == 200, response.text
    wanted = f"<|im_start|>user\n{header}\n\n{TEXT}\nand this?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of(live, tokenizer) == wanted


def test_tokens_are_counted_with_their_documents(live: LiveServer, tokenizer: Tokenizer) -> None:
    part = file(filename="a", file_data=b64(TEXT))
    assert post(live, CHAT, part).status_code == 200
    prompt = live.double.submits[-1].text.tokens.prompt.tolist()
    for path in ("/chat_tokenize", "/tokenize", "/invocations"):
        answered = httpx.post(live.url + path, json=body(CHAT, part)).json()
        if path == "/chat_tokenize":
            assert [token["id"] for token in answered["tokenize_response"]] == prompt
        elif path == "/tokenize":
            assert answered["tokens"] == prompt
        else:
            assert answered["usage"]["prompt_tokens"] == len(prompt)
    assert "predictions" in httpx.post(live.url + "/vertex", json={"instances": [body(CHAT, part)]}).json()
    assert live.double.submits[-1].text.tokens.prompt.tolist() == prompt
    same = document({"type": "text", "data": TEXT}, title="a")
    counted = httpx.post(live.url + MESSAGES + "/count_tokens", json=body(MESSAGES, same)).json()
    assert counted["input_tokens"] == len(prompt)


def test_results_of_tools_may_be_documents(live: LiveServer, tokenizer: Tokenizer) -> None:
    """One history is the same prompt in each dialect."""
    ask, call = {"role": "user", "content": "hi"}, {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = document({"type": "text", "media_type": "text/plain", "data": TEXT}, title="r")
    turns = [
        ask,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [result]}]},
    ]
    assert httpx.post(live.url + MESSAGES, json={"max_tokens": 5, "messages": turns}).status_code == 200
    prompt = prompt_of(live, tokenizer)
    assert f"<|im_start|>tool\nDocument: r\n\n{TEXT}<|im_end|>" in prompt
    items = [
        ask,
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [input_file(filename="r", file_data=b64(TEXT))]},
    ]
    assert httpx.post(live.url + RESPONSES, json={"input": items}).status_code == 200
    assert prompt_of(live, tokenizer) == prompt


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_document_by_url(fetching: LiveServer, tokenizer: Tokenizer, web: Web, path: str) -> None:
    web.pages = {
        "/docs/fox.txt": answer(TEXT.encode(), "Content-Type: text/plain"),
        "/unsaid": answer(b"untyped"),
        "/": answer(b"<p>", "Content-Type: text/html; charset=utf-8"),
    }
    parts = [by_url(path, web.url(name)) for name in ("/docs/fox.txt?v=1", "/unsaid", "/")]
    assert post(fetching, path, *parts).status_code == 200
    wanted = f"user\nDocument: fox.txt\n\n{TEXT}\nDocument: unsaid\n\nuntyped\nDocument: unnamed\n\n<p><|im_end|>"
    assert wanted in prompt_of(fetching, tokenizer)
    assert len(web.heads) == 3


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_no_url_is_fetched_unless_the_operator_says_so(live: LiveServer, web: Web, path: str) -> None:
    web.pages = {"/": answer(b"x")}
    message = said(post(live, path, by_url(path, web.url("/?key=geheim"))), live)
    assert "--fetch-hosts" in message
    assert "url: this server fetches no URLs" in message
    assert "geheim" not in message
    assert not web.heads


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_what_cannot_be_fetched_is_a_400_that_names_field_and_host(fetching: LiveServer, web: Web, path: str) -> None:
    web.pages = {
        "/gone": answer(b"", status="404 Not Found"),
        "/pdf": answer(b"%PDF", "Content-Type: application/pdf"),
        "/latin": answer("ö".encode("latin-1"), "Content-Type: text/plain; charset=iso-8859-1"),
        "/bytes": answer(bytes(range(256))),
    }
    field = {CHAT: "messages[0].content[0].file.file_url", RESPONSES: "input[0].content[0].file_url",
             MESSAGES: "messages[0].content[0].source.url"}[path]  # fmt: skip
    for url, reason in (
        (web.url("/gone?key=geheim"), "'127.0.0.1' answers with status 404"),
        (web.url(host="127.0.0.2"), "'127.0.0.2' is not among the hosts"),
        (web.url("/pdf?key=geheim"), "'application/pdf'"),
        (web.url("/latin"), "'iso-8859-1' cannot be read here: send it in UTF-8"),
        (web.url("/bytes"), "no text"),
    ):
        message = said(post(fetching, path, by_url(path, url)), fetching)
        assert message.startswith(field)
        assert reason in message
        assert "geheim" not in message


@pytest.mark.parametrize(
    ("path", "part", "field", "words"),
    [
        (CHAT, file(file_data=b64("x"), file_url="http://a"), "file", "one of file_data and file_url"),
        (CHAT, file(filename="a"), "file", "one of file_data and file_url"),
        (CHAT, file(file_id="file-1"), "file.file_id", "keeps no files: send"),
        (CHAT, {"type": "file", "file": "a"}, "file", "must be an object"),
        (CHAT, file(file_data=5), "file.file_data", "must be a text, got 5"),
        (CHAT, file(file_data="no base64!"), "file.file_data", "not valid base64"),
        (CHAT, file(file_data="data:text/plain,abc"), "file.file_data", "data:text/plain,abc"),
        (CHAT, file(file_data="data:application/pdf;base64,QUJD"), "file.file_data", "'application/pdf'"),
        (CHAT, file(file_data=b64(b"\xff\xfe")), "file.file_data", "no text in UTF-8"),
        (CHAT, file(file_data=b64(b"a\0b")), "file.file_data", "zero bytes"),
        (CHAT, file(file_data=b64(bytes(MOST_BYTES + 1))), "file.file_data", f"{MOST_BYTES} are possible"),
        (RESPONSES, input_file(file_data="data:image/png;base64,QUJD"), "file_data", "'image/png'"),
        (RESPONSES, input_file(filename=["a"], file_data="QUJD"), "filename", "must be a text"),
        (RESPONSES, input_file(file_id="file-1"), "file_id", "keeps no files"),
        (RESPONSES, {"type": "input_image", "image_url": "http://127.0.0.1/"}, "", "'input_image' is not supported"),
        (CHAT, {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}, "", "'image_url' is not supported"),
        (MESSAGES, document({"type": "base64", "media_type": "application/pdf", "data": "QUJD"}), "source.data", "pdf"),
        (MESSAGES, document({"type": "file", "file_id": "f"}), "source.type", "'file' is not supported; send text"),
        (MESSAGES, document({"type": "content", "content": []}), "source.type", "'content'"),
        (MESSAGES, document("x"), "source", "must be an object"),
        (MESSAGES, document({"type": "text", "data": None}), "source.data", "must be a text"),
        (MESSAGES, document({"type": "text", "data": "x" * (MOST_BYTES + 1)}), "source.data", "are possible"),
        (MESSAGES, document({"type": "text", "data": "x"}, title=5), "title", "must be a text"),
        (MESSAGES, document({"type": "text", "data": "x"}, citations={"enabled": True}), "citations", "citing"),
        (MESSAGES, {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}}, "", "'image'"),
    ],
)  # fmt: skip
def test_what_is_no_document_is_refused_by_name(
    live: LiveServer, path: str, part: dict[str, Any], field: str, words: str
) -> None:
    where = ("input" if path == RESPONSES else "messages") + "[0].content[0]" + (f".{field}" if field else "")
    message = said(post(live, path, part), live)
    assert message.startswith(where)
    assert words in message


def test_so_many_and_no_more(live: LiveServer) -> None:
    part = document({"type": "text", "data": "x"})
    count = f"{MESSAGES}/count_tokens"
    assert httpx.post(live.url + count, json=body(MESSAGES, *[part] * MOST_DOCUMENTS)).status_code == 200
    assert f"at most {MOST_DOCUMENTS}" in said(post(live, MESSAGES, *[part] * (MOST_DOCUMENTS + 1)), live)


def test_all_are_read_before_one_is_fetched(fetching: LiveServer, web: Web) -> None:
    web.pages = {"/": answer(b"x")}
    said(post(fetching, CHAT, file(file_url=web.url()), file(file_id="f")), fetching)
    assert not web.heads


def test_a_client_that_goes_away_ends_its_fetch(fetching: LiveServer, web: Web) -> None:
    web.pages = {"/": lambda: [b"HTTP/1.1 200 OK\r\n\r\n", 10.0]}
    leave_when(web.called.is_set, fetching, CHAT, body(CHAT, file(file_url=web.url())))
    assert web.broken.wait(60)
    assert not fetching.double.submits


def test_the_requests_own_time_limit_holds_here_too(fetching: LiveServer, web: Web) -> None:
    web.pages = {"/": lambda: [b"HTTP/1.1 200 OK\r\n\r\n", 10.0], "/soon": lambda: [0.2, *answer(b"x")()]}
    response = post(fetching, CHAT, file(file_url=web.url()), limit="0.4")
    assert response.status_code == 504
    assert "0.4 s" in response.json()["error"]["message"]
    assert post(fetching, CHAT, file(file_url=web.url("/soon")), limit="30", timeout=60).status_code == 200
    left = fetching.double.submits[-1].scheduling.total_seconds
    assert left is not None
    assert 0 < left < 29.8


def test_the_first_that_fails_ends_the_others(fetching: LiveServer, web: Web) -> None:
    web.pages = {"/": lambda: [b"HTTP/1.1 200 OK\r\n\r\n", 10.0], "/gone": answer(b"", status="410 Gone")}
    assert "410" in said(post(fetching, CHAT, file(file_url=web.url()), file(file_url=web.url("/gone"))), fetching)
    assert web.broken.wait(60)


@given(st.text(), st.text())
def test_a_name_is_one_line(name: str, text: str) -> None:
    header, _, rest = _shown(DocumentPart("f", "text", text), name, text).partition("\n")
    assert header.startswith("Document: ")
    assert len(header.splitlines()) == 1
    assert header.isprintable()
    assert rest == f"\n{text}"


@given(st.binary(max_size=300), st.integers(1, 80))
def test_base64_may_have_line_breaks(content: bytes, width: int) -> None:
    text = b64(content)
    lines = "\n".join(text[i : i + width] for i in range(0, len(text), width))
    found = file_fields({"file_data": f"data:text/plain;base64,{lines}"}, "p")
    assert base64.b64decode("".join(found.value.split())) == content
    assert found.media_type == "text/plain"


@pytest.mark.parametrize(
    "declared",
    ["text/plain", "TEXT/HTML; charset=UTF-8", "application/json", "application/ld+json", "application/xml", "",
     "text/x-c", "application/x-yaml", 'text/plain; charset="utf-8"', "application/octet-stream",
     "text/plain;format=flowed"],
)  # fmt: skip
def test_types_of_text(declared: str) -> None:
    _check_type(declared, "f")


@pytest.mark.parametrize(
    "declared",
    ["application/pdf", "image/svg+xml", "image/png", "text", "audio/mpeg", "application/zip", "application/jsonx",
     "text/", "application/vnd.ms-excel", "text/plain; charset=latin-1", "text/plain;a=b; Charset='utf-16'"],
)  # fmt: skip
def test_types_of_other_things(declared: str) -> None:
    with pytest.raises(RequestFailed, match="cannot be read here") as caught:
        _check_type(declared, "f")
    assert declared.partition(";")[0] in caught.value.message or "UTF-8" in caught.value.message


def test_many_documents_do_not_mix(fetching: LiveServer, tokenizer: Tokenizer, web: Web) -> None:
    """They come in whatever order the servers have them, and stand in the order of the parts."""
    order = random.sample(range(5), 5)
    web.pages = {f"/{n}": lambda n=n: [0.05 * order[n], *answer(b"%d" % n)()] for n in range(5)}  # type: ignore[misc]
    assert post(fetching, CHAT, *(file(file_url=web.url(f"/{n}")) for n in range(5))).status_code == 200
    assert "\n".join(f"Document: {n}\n\n{n}" for n in range(5)) in prompt_of(fetching, tokenizer)
