"""Live and Requests of the page at /ui/, and what holds for all views: keys, names for readers of the screen."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed: pip install 'tokenyard[test]'")

from playwright.sync_api import FilePayload, Route, expect

from tests.system.server import Server
from tests.ui.browser import MILLISECONDS, Visit, needs_chromium, paused

pytestmark = needs_chromium
expect.set_options(timeout=MILLISECONDS)

# A PNG of one pixel.
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="


PAINTER = {"model": "painter", "size": "1x1", "num_inference_steps": 3, "guidance_scale": 2}


def begin_long_answer(visit: Visit) -> None:
    visit.set("Longest answer", "1900")
    visit.set("Further fields", '{"ignore_eos": true}')
    visit.start("Tell me a story.")
    expect(visit.page.locator("article.assistant .text")).not_to_have_text("")


def open_view(visit: Visit, name: str) -> None:
    visit.page.locator(".top nav").get_by_role("link", name=name).click()


def test_live_figures_move(visit: Visit) -> None:
    visit.set("Longest answer", "8")
    visit.send("Hello.")
    open_view(visit, "Live")
    expect(visit.page.locator(".plot canvas")).to_have_count(6)
    expect(visit.page.locator("figure", has_text="Between tokens").locator("output").first).not_to_have_text("–")
    expect(visit.page.locator(".live")).to_contain_text("Ready")
    steps = visit.page.locator(".live tbody td").last
    expect(steps).not_to_have_text("0")  # a status is half a second old
    before = int(steps.inner_text())
    assert before > 0
    open_view(visit, "Chat")
    visit.send("Hello again.")
    open_view(visit, "Live")
    visit.page.wait_for_function(
        "(before) => Number([...document.querySelectorAll('.live tbody td')].at(-1)?.textContent) > before", arg=before
    )


def test_requests_are_shown_with_their_decisions(visit: Visit) -> None:
    visit.set("Longest answer", "8")
    visit.send("Hello.")
    visit.page.get_by_role("link", name="why").click()
    why = visit.page.locator(".why li")
    expect(why.first).to_contain_text("queued with")
    expect(why.last).to_contain_text("finished with")
    row = visit.page.locator(".requests tbody tr[aria-current=true]")
    expect(row).to_contain_text("/v1/chat/completions")
    expect(row).to_contain_text("ended")


def test_an_operator_aborts_a_request(visit: Visit, embedded: Server) -> None:
    before = visit.count("aborted")
    begin_long_answer(visit)
    with paused(embedded):
        open_view(visit, "Requests")
        visit.page.get_by_role("button", name="Abort ui-").first.click()
        open_view(visit, "Chat")
        visit.wait_for_answer()
    assert "stopped here" not in visit.page.locator(".figures").inner_text()
    visit.wait_for_count("aborted", before)


def test_nothing_stands_in_the_way_of_a_reader_of_the_screen(visit: Visit, source: Path) -> None:
    _with(visit, {"paints": [PAINTER]})
    visit.set("Longest answer", "8")
    visit.page.get_by_label("Log-probabilities").check()
    visit.send("Hello.")
    visit.button("Token map").click()
    visit.page.locator(".token").first.click()
    visit.page.evaluate((source / "node_modules" / "axe-core" / "axe.min.js").read_text())
    places = {"Live": ".live figure", "Requests": ".requests table", "Images": ".images form", "Raw": ".raw-text"}
    places["Chat"] = ".chat"
    for scheme in ("light", "dark"):
        visit.page.emulate_media(color_scheme=scheme)
        for name, place in places.items():
            open_view(visit, name)
            visit.page.locator(place).first.wait_for()
            found = visit.page.evaluate("axe.run()")["violations"]
            assert [(name, scheme, one["id"], [node["html"] for node in one["nodes"]]) for one in found] == []


def test_a_narrow_window_needs_no_scrolling_sideways(visit: Visit) -> None:
    visit.page.set_viewport_size({"width": 380, "height": 700})
    visit.page.get_by_role("button", name="Conversations").click()
    visit.page.get_by_role("button", name="Parameters").click()
    for name in ("Chat", "Live"):
        open_view(visit, name)
        visit.page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")
    expect(visit.page.get_by_label("Message", exact=True)).to_have_count(0)
    open_view(visit, "Chat")
    expect(visit.button("Send")).to_be_visible()


def test_a_text_goes_on_in_colour(visit: Visit) -> None:
    open_view(visit, "Raw")
    box = visit.page.get_by_role("textbox", name="Text")
    box.fill("What is tokenyard?")
    visit.set("Most tokens", "8")
    visit.set("Temperature", "0")
    visit.button("Go on").click()
    answered = visit.page.locator(".raw-text .answered")
    expect(answered).not_to_have_count(0)
    visit.button("Go on").wait_for()
    assert {name[:10] for name in answered.evaluate_all("all => all.map((one) => one.className)")} == {"answered p"}
    longer = box.text_content() or ""
    assert longer.startswith("What is tokenyard?")
    assert len(longer) > len("What is tokenyard?")
    # What was answered is a part of the text that goes on next; only the last part can be taken back.
    visit.button("Go on").click()
    visit.page.wait_for_function(
        "(length) => document.querySelector('.raw-text').textContent.length > length", arg=len(longer)
    )
    visit.button("Go on").wait_for()
    visit.button("Take back").click()
    expect(box).to_have_js_property("textContent", longer)
    open_view(visit, "Chat")
    open_view(visit, "Raw")
    again = visit.page.get_by_role("textbox", name="Text")
    expect(again).not_to_have_text("")  # it is filled once it is shown
    expect(again).to_have_js_property("textContent", longer)


def test_sound_is_played(visit: Visit) -> None:
    """What the model says is tested with itself; here it is silence."""
    asked: list[dict[str, Any]] = []

    def answer(route: Route) -> None:
        asked.append(json.loads(route.request.post_data or ""))
        route.fulfill(body=silence(), content_type="audio/wav")

    _as_task(visit, "speak")
    visit.page.route("**/v1/audio/speech", answer)
    visit.page.locator(".raw textarea").fill("a red house")
    visit.button("Speak").click()
    place = ".raw audio"
    visit.page.locator(place).wait_for()
    # It has been read: it is not refused by the page's policy.
    ready = "(one) => one.readyState >= 1 && !one.error"
    visit.page.wait_for_function(f"(place) => ({ready})(document.querySelector(place))", arg=place)
    assert "a red house" in asked[0].values()


def test_pictures_are_painted_by_the_fields_and_stopped(visit: Visit) -> None:
    """A painter of one pixel, whose seed 9 is too large; that the embedded one paints is tested with itself."""
    asked: list[dict[str, Any]] = []
    held: list[Route] = []

    def answer(route: Route) -> None:
        body = json.loads(route.request.post_data or "")
        asked.append(body)
        if body["prompt"] == "a long one":
            held.append(route)
        elif body["seed"] == 9:
            route.fulfill(status=400, json={"error": {"message": "size: the nearest size is 8x8"}})
        else:
            parts = [*(("partial_image", i) for i in range(3)), ("completed", None)]
            events = [{"type": f"image_generation.{name}", "partial_image_index": i} for name, i in parts]
            lines = [json.dumps(event | {"b64_json": PIXEL, "size": "1x1"}) for event in events]
            route.fulfill(body="".join(f"data: {line}\n\n" for line in lines), content_type="text/event-stream")

    expect(visit.page.locator(".top nav").get_by_role("link", name="Images")).to_have_count(0)
    _with(visit, {"paints": [PAINTER]})
    visit.page.route("**/v1/images/generations", answer)
    open_view(visit, "Images")
    prompt = visit.page.get_by_label("What the picture shows")
    prompt.fill("a red house")
    for label, value in (("Pictures", "3"), ("Seed", "7"), ("Steps", "5"), ("Guidance", "1.5"), ("Size", "1x1")):
        visit.set(label, value)
    visit.button("Paint").click()
    made = visit.page.locator(".pictures img[alt='a red house']")
    expect(made).to_have_count(2)
    visit.page.wait_for_function("() => document.querySelector('img.made').naturalWidth === 1")
    fields = {"model": "painter", "num_inference_steps": 5, "guidance_scale": 1.5, "size": "1x1", "partial_images": 3}
    assert {**fields, "prompt": "a red house", "stream": True}.items() <= asked[0].items()
    assert sorted(body["seed"] for body in asked) == [7, 8, 9]
    expect(visit.page.locator(".pictures [role=alert]")).to_have_text("size: the nearest size is 8x8")
    visit.problems.clear()  # the console names the answer 400
    prompt.fill("a long one")
    prompt.press("Enter")
    expect(visit.page.locator(".pictures progress")).to_have_count(3)
    visit.button("Stop").click()
    expect(visit.page.locator(".pictures [role=alert]", has_text="Stopped.")).to_have_count(3)
    expect(visit.button("Paint")).to_be_visible()
    expect(visit.page.locator(".pictures figure")).to_have_count(6)
    assert len(held) == 3


def test_speech_is_written_down(visit: Visit) -> None:
    _as_task(visit, "transcribe")
    visit.page.route("**/v1/audio/transcriptions", lambda route: route.fulfill(json={"text": "good morning"}))
    file: FilePayload = {"name": "speech.wav", "mimeType": "audio/wav", "buffer": silence()}
    visit.page.get_by_label("A file with speech").set_input_files([file])
    expect(visit.page.locator(".raw")).to_contain_text("good morning")


def _as_task(visit: Visit, task: str) -> None:
    """Opens Raw as it is for a model of this task."""
    _with(visit, {"task": task})
    open_view(visit, "Raw")


def _with(visit: Visit, facts: dict[str, Any]) -> None:
    """Opens the page anew with other facts of the server."""

    def live(route: Route) -> None:
        route.fulfill(json=route.fetch().json() | facts)

    visit.page.route("**/live", live)
    visit.page.reload()
    visit.settle()


def silence() -> bytes:
    """A tenth of a second of sound."""
    with io.BytesIO() as file:
        with wave.open(file, "wb") as sound:
            sound.setnchannels(1)
            sound.setsampwidth(2)
            sound.setframerate(8000)
            sound.writeframes(bytes(1600))
        return file.getvalue()
