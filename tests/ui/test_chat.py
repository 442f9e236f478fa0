"""The chat of the page at /ui/, in a real browser, against a real server of the embedded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed: pip install 'tokenyard[test]'")

from playwright.sync_api import Route, expect

from tests.system.server import Server
from tests.ui.browser import MILLISECONDS, Visit, needs_chromium, paused

pytestmark = needs_chromium
expect.set_options(timeout=MILLISECONDS)

LONG = {"Longest answer": "1900", "Further fields": '{"ignore_eos": true}'}
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
}
HOSTILE = """<img src=x onerror="alert(1)"> <script>alert(2)</script>

[press](javascript:alert(3)) ![picture](https://example.invalid/a.png) <svg/onload=alert(4)>

```html"><img src=x onerror=alert(5)>
<b onclick="alert(6)">code</b>
```

> - **[nested](data:text/html,<script>alert(7)</script>)** `<iframe src="javascript:alert(8)">`

| a | b |
|---|---|
| <style>*{display:none}</style> | <a href="https://example.invalid" style="color:red">b</a> |
"""


def test_an_answer_streams_and_is_there_after_a_reload(visit: Visit) -> None:
    visit.set("Temperature", "0")
    visit.send("What is tokenyard?")
    answer = visit.answer
    assert "token" in answer
    figures = visit.page.locator(".figures").last.inner_text()
    assert all(part in figures for part in ("first token", "tok/s", "prompt", "answer tokens", "stop"))
    visit.page.reload()
    visit.settle()
    expect(visit.page.locator("article.assistant .text")).to_have_text(answer)
    expect(visit.page.get_by_label("Temperature", exact=True)).to_have_value("0")


def test_stop_regenerate_edit_and_branches(visit: Visit, embedded: Server) -> None:
    for label, value in LONG.items():
        visit.set(label, value)
    visit.start("Tell me a story.")
    expect(visit.page.locator("article.assistant .text")).not_to_have_text("")
    with paused(embedded):
        visit.button("Stop").click()
        visit.wait_for_answer()
    stopped = visit.answer
    expect(visit.page.locator(".figures")).to_contain_text("stopped here")
    visit.set("Longest answer", "8")
    visit.button("Regenerate").click()
    expect(visit.page.locator("article.assistant .branches span")).to_have_text("2/2")
    visit.wait_for_answer()
    visit.page.get_by_role("button", name="Earlier branch").click()
    expect(visit.page.locator(".branches span").first).to_have_text("1/2")
    assert visit.answer == stopped
    visit.button("Edit", 0).click()
    visit.page.get_by_label("Text of the message").fill("What is 1 + 1?")
    visit.button("Send as a branch").click()
    expect(visit.page.locator("article.user .branches span")).to_have_text("2/2")
    visit.wait_for_answer()
    expect(visit.page.locator("article")).to_have_count(2)
    visit.page.get_by_role("button", name="Earlier branch").click()
    expect(visit.page.locator(".branches span").first).to_have_text("1/2")
    assert visit.answer == stopped


def test_a_stopped_answer_ends_at_the_server(visit: Visit, embedded: Server) -> None:
    before = visit.count("cancelled")
    for label, value in LONG.items():
        visit.set(label, value)
    visit.start("Tell me a story.")
    expect(visit.page.locator("article.assistant .text")).not_to_have_text("")
    is_end = "x-resume-stream"
    with paused(embedded), visit.page.expect_response(lambda answer: answer.request.headers.get(is_end) == "end"):
        visit.button("Stop").click()
    visit.wait_for_count("cancelled", before)


def test_a_schema_gives_json_of_its_form(visit: Visit) -> None:
    visit.page.get_by_label("Form of the answer").select_option("json_schema")
    visit.set("JSON schema", json.dumps(SCHEMA))
    visit.set("Longest answer", "60")
    visit.send("Name a city as JSON.")
    assert list(json.loads(visit.answer)) == ["city"]
    visit.set("JSON schema", "{")
    visit.page.get_by_label("Message", exact=True).fill("Again")
    expect(visit.button("Send")).to_be_disabled()


def test_tokens_are_coloured_and_another_one_can_be_taken(visit: Visit) -> None:
    visit.set("Temperature", "0")
    visit.page.get_by_label("Log-probabilities").check()
    visit.send("What is tokenyard?")
    visit.button("Token map").click()
    tokens = visit.page.locator(".token")
    expect(tokens.nth(3)).to_be_visible()
    assert {name[:7] for name in tokens.evaluate_all("all => all.map((one) => one.className)")} == {"token p"}
    tokens.nth(1).click()
    other = visit.page.locator(".alternative").nth(1)
    begin = tokens.nth(0).text_content() or ""
    taken = other.locator("code").text_content() or ""
    other.click()
    expect(visit.page.locator(".branches span")).to_have_text("2/2")
    visit.wait_for_answer()
    assert visit.answer.startswith((begin + taken).strip())


def test_two_columns_are_compared(visit: Visit) -> None:
    visit.button("Compare").click()
    for panel, tokens in enumerate(("4", "12")):
        visit.page.get_by_label("Longest answer").nth(panel).fill(tokens)
    visit.start("What is tokenyard?")
    expect(visit.page.locator("article.assistant[aria-busy=false]")).to_have_count(2)
    short, long = visit.page.locator("article.assistant .text").all_inner_texts()
    assert long.startswith(short.strip())
    visit.button("Differences").click()
    expect(visit.page.locator(".column").nth(1).locator("mark")).not_to_have_count(0)
    expect(visit.page.locator(".column").nth(0).locator("mark")).to_have_count(0)


def test_a_tool_is_tried_by_hand(visit: Visit) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Get the weather in a city", "parameters": parameters}
    visit.set("Tools", json.dumps([{"type": "function", "function": function}]))
    visit.set("Temperature", "0")
    visit.send("What is the weather in Paris?")
    assert "Paris" in visit.page.locator(".call pre").inner_text()
    visit.page.get_by_label("Result").fill('{"temperature": 21, "condition": "sunny"}')
    visit.button("Send result").click()
    expect(visit.page.locator("article.tool")).to_have_count(1)
    visit.wait_for_answer()
    assert "21" in visit.answer


def test_hostile_markdown_does_nothing(visit: Visit) -> None:
    _answered_by(visit, HOSTILE)
    visit.send("Be hostile.")
    text = visit.page.locator("article.assistant .text")
    expect(text.locator("img, script, iframe, svg, style, [onclick], [onerror], [style]")).to_have_count(0)
    links = text.locator("a").evaluate_all("all => all.map((one) => one.getAttribute('href'))")
    assert all(link is None or link.startswith("https:") for link in links)
    assert "alert(2)" in visit.answer
    visit.page.wait_for_timeout(200)


def _answered_by(visit: Visit, text: str) -> None:
    """Answers the page's requests with a text."""

    def answer(route: Route) -> None:
        deltas: list[dict[str, Any]] = [{"delta": {"content": f"{part} "}} for part in text.split(" ")]
        deltas.append({"delta": {}, "finish_reason": "stop"})
        events = "".join(f"data: {json.dumps({'choices': [{'index': 0, **delta}]})}\n\n" for delta in deltas)
        route.fulfill(content_type="text/event-stream", body=events + "data: [DONE]\n\n")

    visit.page.route("**/v1/chat/completions", answer)


def test_formulas_are_drawn(visit: Visit) -> None:
    text = "So $a^2 + b^2$ and \\(x\\) and\n\n$$\\frac{1}{2}$$\n\nfor $5 or $6, `$c$`, and $\\unknown{$ stays."
    _answered_by(visit, text)
    visit.send("Calculate.")
    answer = visit.page.locator("article.assistant .text")
    expect(answer.locator("math")).to_have_count(3)
    expect(answer.locator("math mfrac")).to_have_count(1)
    expect(answer.locator("math[display=block]")).to_have_count(1)
    for part in ("for $5 or $6, ", "$c$", "\\unknown{"):
        expect(answer).to_contain_text(part)
    expect(answer.locator("[style]")).to_have_count(0)


def test_a_broken_stream_goes_on(visit: Visit) -> None:
    lost: list[str] = []

    def once(route: Route) -> None:
        if lost:
            route.continue_()
            return
        lost.append(route.request.headers["x-request-id"])
        chunk = {"choices": [{"index": 0, "delta": {"role": "assistant"}}]}
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\n")

    visit.page.route("**/v1/chat/completions", once)
    visit.set("Temperature", "0")
    visit.send("What is tokenyard?")
    assert lost
    assert "token" in visit.answer
    assert "reconnected" in visit.page.locator(".figures").inner_text()


def test_conversations_are_exported_and_imported(visit: Visit, tmp_path: Path) -> None:
    visit.set("Longest answer", "4")
    visit.send("Hello, export.")
    with visit.page.expect_download() as download:
        visit.button("Export").click()
    file = tmp_path / "conversations.json"
    download.value.save_as(file)
    assert "Hello, export." in file.read_text()
    visit.page.get_by_label("Delete Hello, export.").click()
    expect(visit.page.locator(".list li")).to_have_count(0)
    visit.page.get_by_label("Files of conversations").set_input_files(file)
    expect(visit.page.locator(".list li")).to_have_count(1)
    file.write_text('{"conversations": [{"id": 1}]}')
    visit.page.get_by_label("Files of conversations").set_input_files(file)
    expect(visit.page.locator(".list [role=status]")).to_contain_text("no conversations of this page")
