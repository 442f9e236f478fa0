"""Videos in every dialect that has them: one video and text give the same tokens and arrays."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api_server.dialects.sglang import sessions
from api_server.text.tokenizer import Tokenizer
from interfaces import SessionAction, SessionAnswer, SessionOrder, TextAndVisionContext
from scheduler.sessions import Sessions
from shared.endpoints import RunDirectory
from shared.settings import Settings
from tests.api_server.conftest import LiveServer, leave_when, serving
from tests.api_server.media import clips, models
from tests.api_server.media.test_dialects import (
    CHAT,
    GENERATE,
    RESPONSES,
    arrays_while_held,
    b64,
    chat,
    context,
    double_of,
    image_part,
    ok,
    png,
    post,
    text_part,
)

QUESTION = "What happens?"
GIF = clips.animation(count=8, milliseconds=250)
FRAMES = [clips.still(i) for i in range(4)]


def uri(data: bytes, kind: str = "image/gif") -> str:
    return f"data:{kind};base64,{b64(data)}"


def video_part(url: Any, **options: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url, **options}}


PARTS_WITH_VIDEOS = models.PARTS.replace(
    "{% else %}{{ part.text }}", "{% elif part.type == 'video' %}VIDEO{% else %}{{ part.text }}"
)
MARK = "<|vision_start|><|video_pad|><|vision_end|>"
PROMPT = f"<|im_start|>user\n{MARK}{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


def started(directory: Path, model: Path) -> Iterator[LiveServer]:
    run_directory = RunDirectory(directory)
    tokenizer = Tokenizer.load(str(model))
    double = double_of(run_directory, tokenizer)
    with serving(double, run_directory, tokenizer, Settings(model=str(model))) as live:
        yield live
    double.close()


@pytest.fixture(scope="module")
def watching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A tiny Qwen2-VL."""
    template = PARTS_WITH_VIDEOS.replace("VIDEO", MARK)
    model = models.write(tmp_path_factory.mktemp("watching") / "tiny-qwen", "qwen2_vl", template)
    yield from started(tmp_path_factory.mktemp("run"), model)


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A tiny LLaVA, which is shown no videos."""
    model = models.write(tmp_path_factory.mktemp("blind") / "tiny-llava", "llava")
    yield from started(tmp_path_factory.mktemp("run"), model)


def generate(**media: Any) -> dict[str, Any]:
    return {"text": PROMPT, "sampling_params": {"max_new_tokens": 3}, **media}


def seen(live: LiveServer, path: str, body: Any) -> tuple[list[int], list[bytes], bool]:
    arrays = arrays_while_held(live, path, body)
    return context(live).tokens.prompt.tolist(), arrays, context(live).images[0].is_video


def test_all_dialects_give_the_same_tokens_and_arrays(watching: LiveServer) -> None:
    parts = [{"type": "input_video", "video_url": uri(GIF)}, {"type": "input_text", "text": QUESTION}]
    found = [
        seen(watching, CHAT, chat(video_part(uri(GIF)), text_part(QUESTION))),
        seen(watching, CHAT, chat({"type": "video_url", "video_url": uri(GIF)}, text_part(QUESTION))),
        seen(watching, RESPONSES, {"input": [{"role": "user", "content": parts}], "max_output_tokens": 3}),
        seen(watching, GENERATE, generate(video_data=uri(GIF))),
        seen(watching, GENERATE, generate(video_data=[b64(GIF)])),
        seen(watching, GENERATE, generate(video_data={"url": uri(GIF)})),
    ]
    assert all(each == found[0] for each in found)
    tokens, arrays, is_video = found[0]
    assert is_video
    assert len(arrays) == 1
    video = context(watching).images[0]
    assert video.side_arrays["video_grid_thw"].tolist() == [[2, 4, 4]], "four frames of two seconds, in pairs"
    assert tokens.count(context(watching).vision_token_ids[0]) == video.end_idx - video.start_idx == 8


def test_frames_are_shown_as_they_are_given(watching: LiveServer) -> None:
    images = [uri(frame, "image/png") for frame in FRAMES]
    joined = "data:video/jpeg;base64," + ",".join(map(b64, FRAMES))
    found = [
        seen(watching, CHAT, chat(video_part(images), text_part(QUESTION))),
        seen(watching, CHAT, chat(video_part(joined), text_part(QUESTION))),
        seen(watching, CHAT, chat({"type": "video", "video": images}, text_part(QUESTION))),
        seen(watching, GENERATE, generate(video_data={"frames": list(map(b64, FRAMES))})),
    ]
    assert all(each == found[0] for each in found)
    assert context(watching).images[0].side_arrays["video_grid_thw"].tolist() == [[2, 4, 4]]


def test_every_form_of_a_batch(watching: LiveServer) -> None:
    other = clips.animation(count=4, milliseconds=1000)
    two = {"text": [PROMPT, PROMPT], "sampling_params": {"max_new_tokens": 3}}

    def hashes(body: dict[str, Any]) -> list[list[int | None]]:
        before = len(watching.double.submits)
        ok(watching, GENERATE, body)
        contexts = [submit.context for submit in watching.double.submits[before:]]
        contexts.sort(key=lambda each: str(each.request_id))
        return [
            [image.image_hash for image in each.images] if isinstance(each, TextAndVisionContext) else []
            for each in contexts
        ]

    names = {"rid": ["a", "b"]}
    (one,), (same,) = hashes(two | names | {"video_data": uri(GIF)})
    assert one == same
    (first,), (second,) = hashes(two | names | {"video_data": [uri(GIF), uri(other)]})
    assert first == one != second
    assert hashes(two | names | {"video_data": [[uri(GIF)], [uri(other)]]}) == [[first], [second]]
    both = PROMPT.replace(MARK, f"{MARK} and {MARK}")
    nested = {"text": [both, "Hello"], "video_data": [[uri(GIF), uri(other)], []]}
    assert hashes(two | names | nested) == [[first, second], []]


def test_wishes_of_a_client(watching: LiveServer) -> None:
    def frames(*parts: Any, **fields: Any) -> int:
        ok(watching, CHAT, chat(*parts, text_part(QUESTION), **fields))
        return int(context(watching).images[0].side_arrays["video_grid_thw"][0, 0]) * 2

    assert frames(video_part(uri(GIF), num_frames=2)) == 2
    assert frames(video_part(uri(GIF), fps=4)) == 8
    assert frames(video_part(uri(GIF)), media_io_kwargs={"video": {"fps": 3}}) == 6
    assert frames(video_part(uri(GIF), fps=4), media_io_kwargs={"video": {"fps": 3}}) == 8
    assert frames(video_part(uri(GIF), num_frames=4), media_io_kwargs={"video": {"fps": 3}}) == 4
    assert frames(video_part(uri(GIF)) | {"num_frames": 4}, media_io_kwargs={"video": {"fps": 3}}) == 4


def test_images_and_videos_in_one_message(watching: LiveServer) -> None:
    ok(watching, CHAT, chat(image_part(png()), video_part(uri(GIF)), text_part("?"), image_part(png(1))))
    assert [image.is_video for image in context(watching).images] == [False, True, False]
    starts = [image.start_idx for image in context(watching).images]
    assert starts == sorted(starts)


def test_a_video_is_read_once(watching: LiveServer) -> None:
    images = watching.state.media.images
    video = clips.animation(count=5)
    body = chat(video_part(uri(video)), text_part(QUESTION))
    before = len(images._kept)
    for _ in range(3):
        ok(watching, CHAT, body)
    assert len(images._kept) == before + 1


def test_a_waiting_video_is_dropped_with_its_client(watching: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    images = watching.state.media.images
    monkeypatch.setattr(images, "_video_slots", asyncio.Semaphore(0))
    body = chat(video_part(uri(clips.animation(count=7))), text_part(QUESTION))
    leave_when(lambda: len(images._coming) == 1, watching, CHAT, body)
    watching.double.wait(lambda: not images._coming)


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        (video_part(uri(b"nonsense")), "messages[0].content[0].video_url: the video is no video that can be read"),
        (video_part(uri(GIF[:60])), "messages[0].content[0].video_url: the video is no image that can be read"),
        (video_part("file:///etc/passwd"), "must be an http or https URL or a data URI"),
        (video_part(7), "must be a URL, a data URI or a list"),
        (video_part([]), "has 0 frames; 1 to 768 are possible"),
        (video_part([uri(FRAMES[0]), uri(b"x")]), "a frame, number 1, that is no image"),
        (video_part(uri(GIF), fps=0), "fps must be a number above 0"),
        (video_part(uri(GIF), fps=True), "fps must be a number above 0"),
        (video_part(uri(GIF), num_frames=9), "has 8 frames, fewer than num_frames 9"),
        (video_part(uri(GIF), num_frames=0), "num_frames must be an integer of 1 to 768"),
        (video_part(uri(GIF), num_frames=2, fps=2), "fps and num_frames exclude each other"),
    ],
)
def test_bad_videos_are_refused_and_name_their_part(watching: LiveServer, part: Any, complaint: str) -> None:
    response = post(watching, CHAT, chat(part, text_part(QUESTION)))
    assert response.status_code == 400, response.text
    assert complaint in response.json()["error"]["message"]


def test_a_request_has_few_urls_and_frames(watching: LiveServer) -> None:
    urls = [f"http://example.com/{i}.png" for i in range(20)]
    response = post(watching, CHAT, chat(video_part(urls), video_part(urls), text_part(QUESTION)))
    assert response.status_code == 400, response.text
    assert "messages has videos with 40 URLs; at most 32 are possible" in response.json()["error"]["message"]
    many = [uri(FRAMES[0], "image/png")] * 400
    response = post(watching, CHAT, chat(video_part(many), video_part(many), text_part(QUESTION)))
    assert response.status_code == 400, response.text
    assert "messages has videos of 800 frames and files together; at most 768" in response.json()["error"]["message"]


def test_places_and_videos_must_be_as_many(watching: LiveServer) -> None:
    response = post(watching, GENERATE, generate(video_data=[uri(GIF), uri(GIF)]))
    assert response.status_code == 400
    assert "has 1 places for videos (<|video_pad|>) and the request has 2 videos" in response.text


def test_a_model_without_videos_says_why(blind: LiveServer) -> None:
    response = post(blind, CHAT, chat(video_part(uri(GIF)), text_part(QUESTION)))
    assert response.status_code == 400, response.text
    assert "takes no videos on this server: videos are not supported for this type of model" in response.text
    ok(blind, CHAT, chat(image_part(png()), text_part(QUESTION)))


def test_a_video_file(watching: LiveServer) -> None:
    pytest.importorskip("av", reason="video files need the extra video")
    data = clips.file(count=30, fps=10)
    ok(watching, CHAT, chat(video_part(f"data:video/mp4;base64,{base64.b64encode(data).decode()}"), text_part("?")))
    assert context(watching).images[0].side_arrays["video_grid_thw"].tolist() == [[3, 4, 4]]


def session_turn(live: LiveServer, text: str, name: str, media: dict[str, Any], **params: Any) -> list[int | None]:
    """Hashes of the images of the request that continues the session."""
    body = {"text": text, "rid": name, "session_params": {"id": "s"} | params, "sampling_params": {"max_new_tokens": 3}}
    ok(live, GENERATE, body | media)
    found = live.double.submits[-1].context
    return [image.image_hash for image in found.images] if isinstance(found, TextAndVisionContext) else []


def test_a_session_keeps_its_images_and_videos(watching: LiveServer) -> None:
    ok(watching, "/open_session", {"capacity_of_str_len": 1000, "session_id": "s"})
    picture = {"image_data": uri(png(), "image/png")}
    image_place = "<|vision_start|><|image_pad|><|vision_end|>"
    first = session_turn(watching, PROMPT, "a", {"video_data": uri(GIF)})
    whole = context(watching).tokens.prompt.tolist()
    inside = context(watching).images[0].start_idx + 3
    second = session_turn(watching, " And here?", "b", {}, rid="a")
    assert second == first
    assert context(watching).tokens.prompt.tolist()[: len(whole)] == whole
    assert context(watching).images[0].is_video
    third = session_turn(watching, f"{image_place} And this?", "c", picture, rid="b")
    assert len(third) == 2
    assert third[0] == first[0]
    assert session_turn(watching, " So?", "d", {}, rid="c", drop_previous_output=True) == third
    assert session_turn(watching, " So?", "e", {}, rid="c", offset=len(whole)) == first
    assert session_turn(watching, "Hello", "f", {}, rid="c", offset=2) == []
    body = {"text": "x", "session_params": {"id": "s", "rid": "c", "offset": inside}}
    response = post(watching, GENERATE, body)
    assert response.status_code == 400
    assert "cuts the tokens of an image: choose another offset" in response.text


def test_a_turn_that_its_session_cannot_keep_is_refused(watching: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    other = clips.animation(count=4, milliseconds=1000)
    monkeypatch.setattr(sessions, "SESSION_MEDIA_BYTES", len(GIF) + len(other) - 1)
    ok(watching, "/open_session", {"capacity_of_str_len": 1000, "session_id": "s2"})
    params: dict[str, Any] = {"id": "s2"}
    first = session_turn(watching, PROMPT, "a", {"video_data": uri(GIF)}, **params)
    # The same video counts once.
    assert session_turn(watching, PROMPT, "b", {"video_data": uri(GIF)}, rid="a", **params) == first * 2
    submits = len(watching.double.submits)
    body = {"text": PROMPT, "rid": "c", "session_params": {"id": "s2", "rid": "b"}, "video_data": uri(other)}
    response = post(watching, GENERATE, body)
    assert response.status_code == 400
    assert f"videos of {len(GIF) + len(other)} bytes together; at most" in response.text
    assert len(watching.double.submits) == submits
    assert session_turn(watching, " So?", "d", {}, rid="b", **params) == first * 2


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_session_gets_the_files_of_a_video_once(
    watching: LiveServer, monkeypatch: pytest.MonkeyPatch, is_forgotten: bool
) -> None:
    name = f"once, {is_forgotten}"
    kept = watching.double.sessions
    sent: list[list[list[bytes]]] = []

    def obey(order: SessionOrder, incarnation: int) -> SessionAnswer:
        if order.action == SessionAction.REMEMBER:
            sent.append([medium.files for medium in order.media])
            if is_forgotten:
                kept._open[name].turns.pop("a", None)
        return Sessions.obey(kept, order, incarnation)

    monkeypatch.setattr(kept, "obey", obey)
    ok(watching, "/open_session", {"capacity_of_str_len": 1000, "session_id": name})
    params: dict[str, Any] = {"id": name}
    first = session_turn(watching, PROMPT, "a", {"video_data": uri(GIF)}, **params)
    assert session_turn(watching, " So?", "b", {}, rid="a", **params) == first
    # A turn whose parent is forgotten meanwhile is kept with all that it has.
    assert sent == [[[GIF]], [[]], *[[[GIF]]] * is_forgotten]
    assert session_turn(watching, " So?", "c", {}, rid="b", **params) == first
